"""An agent session with a scripted engine and an in-memory retriever."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from search_r1.agent.generation import search_agent
from search_r1.agent.tags import TEMPLATES
from search_r1.inference.dialogue import AgentSession, DialogueListener, Search
from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.protocol import Retrieval
from search_r1.retrieval.schema import Document
from tests.fakes import ByteTokenizer, ScriptedEngine
from verl.agent.dialogue import Limits
from verl.rollout.interface import RolloutEngine
from verl.types import Completion, Sampling

SHORT = TEMPLATES["short"]
OSLO = Document.from_title("12", "Oslo", "Oslo is the capital of Norway.")
NORWAY = Document.from_title("7", "Norway", "Norway lies in Europe.")
FOUND = {"capital of Norway": [OSLO, NORWAY], "Oslo": [OSLO]}

TWO_SEARCHES = (
    "<think> Where? </think> <search> capital of Norway </search>",
    "<think> Sure? </think> <search> Oslo </search>",
    "<think> So it is. </think> <answer> Oslo </answer>",
)


class RecordingListener(DialogueListener):
    """Records all events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def said(self, text: str) -> None:
        self.events.append(("said", text))

    def turned(self) -> None:
        self.events.append(("turned", ""))

    def searched(self, search: Search) -> None:
        self.events.append(("searched", search.query))

    def corrected(self, text: str) -> None:
        self.events.append(("corrected", text))


class SpellingEngine(ScriptedEngine):
    """A scripted engine that streams its text letter by letter."""

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Callable[[str], None]
    ) -> Completion:
        completion = await self.generate(prompt_ids, sampling)
        for letter in completion.text:
            listener(letter)
        return completion


def session(
    engine: RolloutEngine,
    retrieval: Retrieval | None = None,
    *,
    max_turns: int = 3,
    limit: int = 2000,
) -> AgentSession:
    """Build a session with the short template."""
    limits = Limits(max_turns=max_turns, max_obs_length=2000)
    agent = search_agent(retrieval or InMemoryRetrieval(FOUND), ByteTokenizer(), limits, SHORT)
    return AgentSession(agent, engine, ByteTokenizer(), Sampling(500, 0.0), 0, limit)
