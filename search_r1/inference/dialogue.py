"""One question asked of an agent: heard as it happens, and its outcome as plain data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from search_r1.search.schema import Document, well_formed
from verl.agent.dialogue import DialogueAgent
from verl.agent.interface import Observation, ToolCall, Turn
from verl.data import Tokenizer, num_tokens, render
from verl.data.rows import Message, Row
from verl.errors import DataError, explain
from verl.rollout.interface import RolloutEngine
from verl.types import Completion, Origin, Prompt, Sampling, Status, Trajectory, start_trajectory

MARK = "Question:"
"""What precedes the question in the prompts of our data sets, and of the original's."""


def question_of(row: Row) -> str:
    """`extra_info.question`, else what follows `Question:` in the last message, else ''."""
    named = row.extra_info.get("question")
    if isinstance(named, str) and named.strip():
        return named.strip()
    text = row.prompt if isinstance(row.prompt, str) else row.prompt[-1]["content"]
    return text.rpartition(MARK)[2].strip() if MARK in text else ""


@dataclass(frozen=True)
class Search:
    """One search that was carried out, and what it found, best first."""

    query: str
    documents: tuple[Document, ...]


@dataclass(frozen=True)
class Source:
    """A document that some search found."""

    document: Document
    searches: tuple[int, ...]
    """Which searches found it, counted from 1."""


class DialogueListener:
    """Hears a dialogue as it happens; this one keeps silent."""

    def said(self, text: str) -> None:
        """The policy's next words, tags included."""

    def turned(self) -> None:
        """The policy's turn is over."""

    def searched(self, search: Search) -> None:
        """A search was answered."""

    def corrected(self, text: str) -> None:
        """What the policy was told after a turn without an action."""


SILENCE = DialogueListener()


@dataclass(frozen=True)
class Reply:
    """How a dialogue ended."""

    question: str
    answer: str | None
    """What the policy closed as its answer; None without one."""
    searches: tuple[Search, ...]
    trajectory: Trajectory

    @property
    def status(self) -> Status:
        return self.trajectory.status

    @property
    def error(self) -> str:
        """What failed, when the status is failed."""
        return self.trajectory.error

    @property
    def turns(self) -> list[str]:
        """The policy's turns that have any text."""
        policy = (s for s in self.trajectory.segments if s.origin is Origin.POLICY)
        return [segment.text for segment in policy if segment.ids]

    @property
    def sources(self) -> list[Source]:
        """Each document once, in the order in which they were found."""
        found: dict[str, tuple[Document, list[int]]] = {}
        for number, search in enumerate(self.searches, start=1):
            for document in search.documents:
                numbers = found.setdefault(document.id, (document, []))[1]
                if number not in numbers:
                    numbers.append(number)
        return [Source(document, tuple(numbers)) for document, numbers in found.values()]

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints: the outcome, the searches and the whole dialogue."""
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
    """A search with ids and titles of what it found, and its texts where they are wanted."""
    names = ("id", "title", "text") if has_texts else ("id", "title")
    documents = [{name: getattr(d, name) for name in names} for d in search.documents]
    return {"query": search.query, "documents": documents}


@dataclass
class _ListeningEngine(RolloutEngine):
    """Stands before one dialogue's engine, hears its tools, and lets `listener` hear both."""

    engine: RolloutEngine
    listener: DialogueListener
    correction: str
    max_tokens: int | None
    """What the policy may sample in all turns together."""
    searches: list[Search] = field(default_factory=list)
    _is_corrected: bool = False

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One turn; nothing once `max_tokens` is spent."""
        return await self.stream(prompt_ids, sampling, lambda text: None)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Callable[[str], None]
    ) -> Completion:
        """As `generate`; the dialogue's own listener hears what this one's does."""

        def said(text: str) -> None:
            self.listener.said(text)
            listener(text)

        if self.max_tokens is not None:
            if not self.max_tokens:
                return Completion((), (), "", "length")
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, self.max_tokens))
        if self._is_corrected:
            self.listener.corrected(self.correction)
        completion = await self.engine.stream(prompt_ids, sampling, said)
        self.listener.turned()
        if self.max_tokens is not None:
            self.max_tokens -= len(completion.ids)
        self._is_corrected = True
        return completion

    def answered(self, call: ToolCall, observation: Observation) -> None:
        """A tool answered a call; of searches the documents are noted."""
        self._is_corrected = False
        found = tuple(i.source for i in observation.items if isinstance(i.source, Document))
        if call.tool == "search":
            self.searches.append(Search(query_of(call), found))
            self.listener.searched(self.searches[-1])


@dataclass(frozen=True)
class AgentSession:
    """An agent with its running engine: what answers questions."""

    agent: DialogueAgent
    engine: RolloutEngine
    tokenizer: Tokenizer
    sampling: Sampling
    """Temperature and nucleus of every dialogue, unless it brings its own."""
    seed: int | None
    max_start_length: int
    """Tokens of the longest prompt that is accepted."""
    num_at_once: int = 1
    """Dialogues that the engine takes together."""

    def prompt(self, question: str, before: Sequence[Message] = ()) -> Prompt:
        """The question in the agent's wording, after messages. Raises DataError if too long."""
        wording = self.agent.format.user_prompt(well_formed(question))
        return self.render((*before, {"role": "user", "content": wording}))

    def render(self, messages: str | Sequence[Message], uid: str = "question") -> Prompt:
        """Messages as token ids. Raises DataError when they are too long."""
        text = messages if isinstance(messages, str) else tuple(messages)
        limit, row = self.max_start_length, Row(uid, 0, text, "asked", ())
        prompt = render(row, self.tokenizer, self.agent.format.schemas, limit)
        if len(prompt.ids) > limit:
            got = f"{num_tokens(prompt, limit)} tokens"
            fix = f"shorten it, or start with --max-start-length {len(prompt.ids)} or more"
            raise DataError(explain("prompt", got, f"at most {limit}", fix))
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
        """Play one dialogue.

        `max_tokens` bounds what the policy samples in all turns together. A search that fails ends
        in the status failed. Raises UserError when the engine cannot answer.
        """
        correction = self.agent.format.respond(Turn(), None, ())
        heard = _ListeningEngine(self.engine, listener, correction, max_tokens)
        start = start_trajectory(prompt, seed=self.seed if seed is None else seed)
        environment = replace(self.agent.environment, on_observation=heard.answered)
        agent = replace(self.agent, environment=environment)
        end = await agent.run(start, heard, self.sampling if sampling is None else sampling)
        answer = None
        if end.status is Status.ANSWERED:
            last = end.segments[-1]
            said = Completion(last.ids, last.log_probs, last.text, "stop")
            answer = self.agent.format.parse(said).answer
        return Reply(question, answer, tuple(heard.searches), end)


def query_of(call: ToolCall) -> str:
    arguments = call.arguments
    return arguments if isinstance(arguments, str) else str(arguments.get("query", ""))


def past(question: str, answer: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """An earlier question and its answer, as messages that a follow-up stands after."""
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer}
