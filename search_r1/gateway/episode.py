"""One episode at the gateway: its limits, its history, and the engine that samples its turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from search_r1.agent_server.responses import ApiError
from search_r1.gateway.history import EpisodeHistory, Renderer, SampledTurn
from search_r1.gateway.messages import REFUSED, CompletionRequest, read_request
from search_r1.gateway.replies import Answered, Deltas, answered
from verl.agent.dialogue import Limits, derived_seed
from verl.agent.interface import DialogueFormat
from verl.agent.native import NativeFormat
from verl.engine import RolloutEngine
from verl.types import Completion, Sampling, Segment

TOO_LONG, NO_TURNS = "context_length_exceeded", "max_turns_exceeded"
"""Error codes of requests that the limits of a run leave unanswered; the first is OpenAI's."""
ENDED = "episode_ended"
"""Error code of requests that come after the end."""
MAX_REFUSALS = 32
"""Requests that a loop may go on to make after its last turn, before the episode is ended."""
T = TypeVar("T")


@dataclass(frozen=True)
class Policy:
    """How an episode's turns are written, and how many and how long they may be."""

    limits: Limits
    renderer: Renderer
    calls: NativeFormat
    """Reads the calls of a turn."""
    format: DialogueFormat
    """The format of the run, which says of a turn whether it is malformed."""
    sampling: Sampling
    """What the run trains with; requests may name its temperature and top-p, but no others."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts of tokens that may end a turn."""
        return (self.calls.tokenizer.eos_token or "", *self.renderer.reserved)


@dataclass
class Episode:
    """An episode that runs; its requests are answered in the gateway's thread."""

    policy: Policy
    engine: RolloutEngine
    sampling: Sampling
    """That of this episode, such as a greedy one in a validation."""
    seed: int | None
    loop: asyncio.AbstractEventLoop
    """The engine's event loop."""
    history: EpisodeHistory = field(init=False)
    num_requests: int = 0
    last_refusal: ApiError | None = None
    """The last answer, if it was an error."""
    over: asyncio.Future[None] = field(init=False)
    """Done, in the engine's loop, when the episode cannot go on; an engine's error is raised."""
    sampling_tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """What samples now, in the engine's loop."""

    def __post_init__(self) -> None:
        self.history = EpisodeHistory(self.policy.renderer)
        self.over = self.loop.create_future()

    async def answer(self, body: bytes) -> Turn:
        """Check a request and return the turn that answers it. Raises ApiError."""
        try:
            turn = self._turn(body)
        except ApiError as error:
            self.last_refusal = error
            if error.code == NO_TURNS and self.num_requests > MAX_REFUSALS + self.max_turns:
                self.loop.call_soon_threadsafe(self._end)
            raise
        self.last_refusal = None
        return turn

    @property
    def max_turns(self) -> int:
        """Turns of an episode: those that may call tools, and the last one."""
        return self.policy.limits.max_turns + 1

    def _turn(self, body: bytes) -> Turn:
        asked = read_request(body, self.policy.sampling)
        number, limits = self.num_requests, self.policy.limits
        self.num_requests += 1
        if number >= self.max_turns:
            text = f"the episode has had its {self.max_turns} turns; fix: set max_turns={number}"
            raise ApiError(400, f"{text} or more, or end the loop earlier", NO_TURNS)
        context, parent = self.history.context(asked)
        length = sum(segment.num_tokens for segment in context)
        if length > limits.max_prompt_length:
            text = (
                f"This model's maximum context length is {limits.max_prompt_length} tokens. "
                f"However, your messages resulted in {length} tokens "
                "(data.max_prompt_length). Please reduce the length of the messages."
            )
            raise ApiError(400, text, TOO_LONG, "messages")
        sampling = replace(
            self.sampling,
            max_tokens=min(limits.max_response_length, asked.max_tokens or 2**31),
            stop=asked.stop,
            seed=None if self.seed is None else derived_seed(self.seed, number),
        )
        return Turn(self, asked, number, context, parent, sampling)

    async def in_engine(self, sample: Callable[[], Awaitable[T]]) -> T:
        """Sample in the engine's event loop; an engine that fails ends the episode."""

        async def run() -> T:
            if self.over.done():
                raise ApiError(404, "the episode has ended", ENDED)
            task = asyncio.current_task()
            assert task is not None, "a coroutine of a task"
            self.sampling_tasks.add(task)
            try:
                return await sample()
            except Exception as error:
                if not self.over.done():
                    self.over.set_exception(error)
                raise
            finally:
                self.sampling_tasks.discard(task)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self.loop))

    def _end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    async def aclose(self) -> None:
        """Sample nothing more; called in the engine's loop."""
        self._end()
        for task in (running := list(self.sampling_tasks)):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self.over.done() and not self.over.cancelled():
            self.over.exception()  # it was raised, or came too late to matter

    @property
    def is_refused(self) -> bool:
        """Whether the last request asked for what no episode of the run can get."""
        return self.last_refusal is not None and self.last_refusal.code == REFUSED


@dataclass
class Turn:
    """A request that is answered."""

    episode: Episode
    asked: CompletionRequest
    number: int
    context: Sequence[Segment]
    parent: SampledTurn | None
    sampling: Sampling

    @property
    def ids(self) -> list[int]:
        return [i for segment in self.context for i in segment.ids]

    async def sample(self) -> tuple[Answered, Completion]:
        """Sample the turn whole."""
        episode = self.episode
        completion = await episode.in_engine(
            lambda: episode.engine.generate(self.ids, self.sampling)
        )
        return self._record(completion), completion

    async def stream(self) -> AsyncGenerator[str | tuple[Answered, Completion], None]:
        """Yield pieces of the content, and the answer at the end."""
        episode, gateway = self.episode, asyncio.get_running_loop()
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        deltas = Deltas((*episode.policy.ends, *self.sampling.stop), bool(self.asked.tools))

        def listen(piece: str | None) -> None:
            gateway.call_soon_threadsafe(pieces.put_nowait, piece)

        sampling = asyncio.ensure_future(episode.in_engine(
            lambda: episode.engine.stream(self.ids, self.sampling, listen)
        ))  # fmt: skip
        sampling.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                if shown := deltas.feed(piece):
                    yield shown
            completion = await sampling
            answer = self._record(completion)
            if rest := deltas.finish(answer.content):
                yield rest
            yield answer, completion
        finally:
            sampling.cancel()

    def _record(self, completion: Completion) -> Answered:
        policy = self.episode.policy
        tokenizer = policy.calls.tokenizer
        answer = answered(
            completion, policy.calls, policy.ends, self.sampling.stop, bool(self.asked.tools),
            self.number,
        )  # fmt: skip
        is_closed = completion.ids[-1:] == (tokenizer.eos_token_id,)
        is_malformed = policy.format.parse(completion).is_malformed or any(
            call.tool not in self.asked.tool_names for call in answer.calls
        )
        self.episode.history.add(
            self.asked, self.context, self.parent, completion, answer,
            (tokenizer.eos_token or "") if is_closed else "", is_malformed,
        )  # fmt: skip
        return answer
