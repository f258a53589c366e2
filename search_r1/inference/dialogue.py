"""Runs one dialogue with an agent: reports its events to a listener and returns the outcome."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from search_r1.retrieval.schema import Document, well_formed
from verl.agent.control import ControlStrings, break_strings
from verl.agent.dialogue import DialogueAgent
from verl.agent.environment import ObservationListener
from verl.agent.interface import Observation, ToolCall, Turn
from verl.data.outside import neutral_row, strings_of_rows
from verl.data.prompts import Tokenizer, num_tokens, render
from verl.data.rows import Message, Row
from verl.engine import RolloutEngine
from verl.errors import PromptTooLong, explain
from verl.types import Completion, Origin, Prompt, Sampling, Status, Trajectory, start_trajectory


@dataclass(frozen=True)
class Search:
    """One search that was carried out, and the documents it found, best first."""

    query: str
    documents: tuple[Document, ...]


@dataclass(frozen=True)
class Source:
    """A document that was found by at least one search."""

    document: Document
    searches: tuple[int, ...]
    """Numbers of the searches that found it, counted from 1."""


class DialogueListener:
    """Receives the events of a dialogue as they happen; this base class ignores them."""

    def said(self, text: str) -> None:
        """Handle the next part of the policy's text, tags included."""

    def turned(self) -> None:
        """Handle the end of a policy turn."""

    def searched(self, search: Search) -> None:
        """Handle a search and its results."""

    def corrected(self, text: str) -> None:
        """Handle the feedback after a turn without a valid action."""


SILENCE = DialogueListener()
"""A listener that ignores all events."""


@dataclass(frozen=True)
class Reply:
    """The outcome of a dialogue."""

    question: str
    answer: str | None
    """The policy's answer; None without a complete one."""
    searches: tuple[Search, ...]
    trajectory: Trajectory

    @property
    def status(self) -> Status:
        return self.trajectory.status

    @property
    def error(self) -> str:
        """The error message of a failed dialogue; otherwise empty."""
        return self.trajectory.error

    @property
    def turns(self) -> list[str]:
        """The texts of the policy's non-empty turns."""
        return [s.text for s in self.trajectory.segments if s.origin is Origin.POLICY and s.ids]

    @property
    def sources(self) -> list[Source]:
        """Each found document once, in the order in which they were first found."""
        found: dict[str, tuple[Document, list[int]]] = {}
        for number, search in enumerate(self.searches, start=1):
            for document in search.documents:
                numbers = found.setdefault(document.id, (document, []))[1]
                if number not in numbers:
                    numbers.append(number)
        return [Source(document, tuple(numbers)) for document, numbers in found.values()]

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints: the outcome, the searches and the whole dialogue."""
        return {
            "question": self.question,
            "answer": self.answer,
            "status": self.status.value,
            "error": self.error,
            "searches": [search_json(search) for search in self.searches],
            "segments": [
                {"origin": segment.origin.name.lower(), "text": segment.text}
                for segment in self.trajectory.segments
                if segment.origin is not Origin.PROMPT
            ],
            "stats": self.trajectory.stats,
        }


def search_json(search: Search, has_texts: bool = False) -> dict[str, Any]:
    """Convert a search to JSON with its documents' ids and titles, optionally with their texts."""
    names = ("id", "title", "text") if has_texts else ("id", "title")
    documents = [{name: getattr(d, name) for name in names} for d in search.documents]
    return {"query": search.query, "documents": documents}


@dataclass
class _ObservedEngine(RolloutEngine):
    """Wraps the engine of one dialogue to report its turns and tool calls to `listener`."""

    engine: RolloutEngine
    listener: DialogueListener
    correction: str
    """Feedback that the policy reads after a turn without a valid action."""
    max_tokens: int | None
    """Number of tokens that the policy may still sample in all turns together."""
    searches: list[Search] = field(default_factory=list)
    _is_correction_due: bool = False
    """Whether no tool call has been answered since the last turn."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Sample one turn; an empty completion once `max_tokens` is used up."""
        return await self.stream(prompt_ids, sampling, lambda text: None)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Callable[[str], None]
    ) -> Completion:
        """Sample one turn; its text goes to `listener` and to the dialogue's own listener."""

        def report(text: str) -> None:
            self.listener.said(text)
            listener(text)

        if self.max_tokens is not None:
            if not self.max_tokens:
                return Completion((), (), "", "length")
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, self.max_tokens))
        if self._is_correction_due:
            self.listener.corrected(self.correction)
        completion = await self.engine.stream(prompt_ids, sampling, report)
        self.listener.turned()
        if self.max_tokens is not None:
            self.max_tokens -= len(completion.ids)
        self._is_correction_due = True
        return completion

    def record_call(self, call: ToolCall, observation: Observation) -> None:
        """Record an answered tool call; searches are kept with their documents."""
        self._is_correction_due = False
        if call.tool == "search":
            from search_r1.agent.search import documents_of  # noqa: PLC0415 - of the agent

            self.searches.append(Search(query_of(call), documents_of(observation)))
            self.listener.searched(self.searches[-1])


@dataclass(frozen=True)
class AgentSession:
    """An agent with a running engine, ready to answer questions."""

    agent: DialogueAgent
    engine: RolloutEngine
    tokenizer: Tokenizer
    sampling: Sampling
    """Default sampling parameters of a dialogue."""
    seed: int | None
    max_start_length: int
    """Maximum prompt length in tokens."""
    num_at_once: int = 1
    """Maximum number of concurrent dialogues."""

    def prompt(self, question: str, earlier: Sequence[Message] = ()) -> Prompt:
        """Render `earlier` messages and the question in the format's wording. Raises DataError."""
        text = break_strings(well_formed(question), self.agent.reserved or ())
        wording = self.agent.format.user_prompt(text)
        return self.render((*earlier, {"role": "user", "content": wording}))

    @functools.cached_property
    def _row_strings(self) -> ControlStrings:
        return strings_of_rows(self.tokenizer, self.agent.format.tags)

    def render(
        self,
        messages: str | Sequence[Message],
        uid: str = "question",
        extra_info: Mapping[str, Any] = MappingProxyType({}),
    ) -> Prompt:
        """Tokenize messages in their wording, control tokens in them broken up as in `neutral_row`.

        Raises PromptTooLong, or DataError if the chat template rejects them.
        """
        text = messages if isinstance(messages, str) else tuple(messages)
        row = neutral_row(Row(uid, 0, text, "asked", (), extra_info), self._row_strings)
        limit = self.max_start_length
        prompt = render(row, self.tokenizer, self.agent.format.schemas, limit)
        if len(prompt.ids) > limit:
            got = f"{num_tokens(prompt, limit)} tokens"
            fix = f"shorten it, or start with --max-start-length {len(prompt.ids)} or more"
            raise PromptTooLong(explain("prompt", got, f"at most {limit}", fix))
        return prompt

    async def ask(
        self,
        question: str,
        prompt: Prompt,
        listener: DialogueListener = SILENCE,
        *,
        sampling: Sampling | None = None,
        seed: int | None = None,
        max_tokens: int | None = None,
    ) -> Reply:
        """Run one dialogue.

        `max_tokens` limits the tokens that the policy samples in all turns together. A failed
        search gives a reply with status FAILED. Raises UserError if the engine fails.
        """
        correction = self.agent.format.respond(Turn(), None, ())
        engine = _ObservedEngine(self.engine, listener, correction, max_tokens)
        prompt = replace(prompt, extra_info={"question": question, **prompt.extra_info})
        start = start_trajectory(prompt, seed=self.seed if seed is None else seed)
        agent = observed(self.agent, engine.record_call)
        end = await agent.run(start, engine, self.sampling if sampling is None else sampling)
        answer = None
        if end.status is Status.ANSWERED:
            last = end.segments[-1]
            last_turn = Completion(last.ids, last.log_probs, last.text, "stop")
            answer = self.agent.format.parse(last_turn).answer
        return Reply(question, answer, tuple(engine.searches), end)


def observed(agent: DialogueAgent, listener: ObservationListener) -> DialogueAgent:
    """Return the agent with a listener of its calls."""
    return agent.within(replace(agent.environment, on_observation=listener))


def query_of(call: ToolCall) -> str:
    """Return the query of a search call."""
    arguments = call.arguments
    return arguments if isinstance(arguments, str) else str(arguments.get("query", ""))


def as_messages(question: str, answer: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Convert an earlier question and its answer to the messages before a follow-up question."""
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer}
