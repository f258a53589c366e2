"""The dialogue loop: generate a turn, execute its tool calls, append the results, repeat.

One coroutine produces one trajectory. Sampled ids are passed to the engine again as they are, and
never decoded and re-encoded; text of the environment is encoded once and marked as observation.
The context only grows; the trajectory ends when the context budget is used up.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from verl.agent.control import control_strings
from verl.agent.environment import Environment
from verl.agent.interface import DialogueFormat, Item, Observation, ToolCall, Turn
from verl.engine import RolloutEngine
from verl.errors import ConfigError, ToolError, ToolRefused, explain
from verl.types import Completion, Origin, Sampling, Segment, Status, Trajectory

Results = Sequence[Sequence[Item]]
"""The items of each call of a turn."""
PIECE = re.compile(r"\s*(?:[!-\u024f]{1,64}|\S{1,8})")
"""Where a text may be cut: after a word, or within what has no spaces, as Chinese or data."""
CHARS_PER_TOKEN = 16
"""More characters than a token has in prose, to tell from a prefix that a text is too long."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the agent needs."""

    @property
    def all_special_tokens(self) -> list[str]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class Limits:
    """Limits of one dialogue; all lengths are in tokens."""

    max_turns: int = 2
    """Number of turns that may call tools; they are followed by a last turn that may not."""
    max_response_length: int = 500
    """Maximum tokens of one policy turn."""
    max_obs_length: int = 500
    """Maximum tokens of one observation, including the text around it."""
    max_prompt_length: int = 4096
    """Maximum tokens of the context before any turn."""
    no_think_rl: bool = False
    """Whether to put a closed thinking part before each policy turn."""


@dataclass(frozen=True)
class DialogueAgent:
    """The built-in `Agent`; it has no state between trajectories."""

    limits: Limits
    format: DialogueFormat
    environment: Environment
    tokenizer: Tokenizer
    reserved: tuple[str, ...] | None = None
    """Strings that texts from outside must not contain; None reads them from the tokenizer."""

    def __post_init__(self) -> None:
        """Raise ConfigError for settings with which no dialogue could work."""
        if self.reserved is None:
            object.__setattr__(self, "reserved", control_strings(self.tokenizer))
        refuse_closed_think(self.format, self.limits.no_think_rl)
        turn = Turn(tuple(ToolCall(tool.name, "") for tool in self.environment.tools[:1]))
        for name, results in (
            ("empty observation", [() for _ in turn.calls]),
            ("invalid-action feedback", None),
        ):
            needed = count_tokens(self.tokenizer, self._response_text(turn, results))
            if needed > self.limits.max_obs_length:
                got, fix = self.limits.max_obs_length, f"set data.max_obs_length={needed} or more"
                expected = f"at least {needed} for the {name} of template {self.format.name!r}"
                raise ConfigError(explain("data.max_obs_length", got, expected, fix))

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        """Run one dialogue to its end; see `verl.agent.interface.Agent`."""
        trajectory = replace(start, segments=list(start.segments), stats={})
        trajectory.faults = dict.fromkeys(self.environment.faults, 0)
        counts: Counter[str] = Counter()
        if self._opening:
            trajectory.segments.append(self._encoded_segment(Origin.PROMPT, self._opening))
        environment = self.environment
        if self.limits.max_turns:
            environment = environment.for_dialogue(start)
        agent = self if environment is self.environment else self.within(environment)
        try:
            trajectory.status = await agent._play(trajectory, engine, sampling, counts)
        except ToolError as error:
            trajectory.fail(str(error), isinstance(error, ToolRefused))
            _add_faults(trajectory, error.faults)
        trajectory.stats = {**self._stats(counts, trajectory), **environment.ended()}
        return trajectory

    def within(self, environment: Environment) -> Self:
        """Return the agent in another environment; a user's class may have any constructor."""
        agent = copy.copy(self)
        object.__setattr__(agent, "environment", environment)
        return agent

    async def _play(
        self, trajectory: Trajectory, engine: RolloutEngine, sampling: Sampling,
        counts: Counter[str],
    ) -> Status:  # fmt: skip
        """Run turns until one of them ends the dialogue; return the trajectory's status."""
        for number in range(self.limits.max_turns + 1):
            context = [i for segment in trajectory.row for i in segment.ids]
            if len(context) > self.limits.max_prompt_length:
                return Status.OUT_OF_BUDGET
            request = self._request(sampling, trajectory.seed, number)
            is_last = number == self.limits.max_turns
            completion = await engine.generate(context, request)
            trajectory.segments.append(_policy_segment(completion))
            turn = self.format.parse(completion)
            acts = bool(turn.calls) and self.environment.enabled and not is_last
            counts.update(self._counts(completion, turn, acts))
            if turn.answer is not None:
                return Status.ANSWERED
            if is_last:
                return Status.OUT_OF_TURNS
            response = await self._respond(trajectory, turn, acts)
            if not self._append(trajectory, response):
                return Status.OUT_OF_BUDGET
            counts["observation_tokens"] += len(response.ids)
        raise AssertionError("the last turn always returns")

    def _append(self, trajectory: Trajectory, response: Segment) -> bool:
        """Append an observation, unless the context has no room for it; return whether it has."""
        length = sum(segment.num_tokens for segment in trajectory.row) + response.num_tokens
        if has_room := length <= self.limits.max_prompt_length:
            trajectory.segments.append(response)
        return has_room

    def _request(self, sampling: Sampling, seed: int | None, number: int) -> Sampling:
        """Return the sampling parameters of turn `number`, with a seed of its own."""
        return replace(
            sampling,
            max_tokens=self.limits.max_response_length,
            stop=self.format.stop,
            seed=None if seed is None else derived_seed(seed, number),
        )

    def _counts(self, completion: Completion, turn: Turn, acts: bool) -> Counter[str]:
        """Return the statistics of one turn; `acts`: whether its calls are executed."""
        valid_calls = [call for call in turn.calls if self.environment.is_valid(call)]
        is_valid = bool(acts and valid_calls) or turn.answer is not None
        is_malformed = turn.is_malformed or len(valid_calls) < len(turn.calls)
        counts = Counter(
            turns=1,
            valid_actions=int(is_valid),
            invalid_actions=int(not is_valid),
            truncated_turns=int(completion.finish_reason == "length"),
            malformed_turns=int(is_malformed),
        )
        for call in valid_calls:
            tool = self.environment.find(call.tool)
            assert tool is not None, "a valid call names a tool"
            counts.update({tool.metric: 1, f"valid_{tool.metric}": int(acts)})
        return counts

    def _stats(self, counts: Counter[str], trajectory: Trajectory) -> dict[str, float]:
        """Return all statistics of a trajectory, including zeros."""
        metrics = [tool.metric for tool in self.environment.tools]
        calls = [name for metric in metrics for name in (metric, f"valid_{metric}")]
        names = ("turns", *calls, "valid_actions", "invalid_actions", "observation_tokens",
                 "truncated_turns", "malformed_turns")  # fmt: skip
        answered = float(trajectory.status is Status.ANSWERED)
        return {**{name: float(counts[name]) for name in names}, "answered": answered}

    async def _respond(self, trajectory: Trajectory, turn: Turn, acts: bool) -> Segment:
        """Execute the calls of a turn; return the observation, or the invalid-action feedback."""
        if not acts:
            return self._encoded_segment(Origin.OBSERVATION, self._response_text(turn, None))
        observations = await self.environment.act(turn.calls)
        for observation in observations:
            _add_faults(trajectory, observation.faults)
        fitting = self.fit(turn, [observation.items for observation in observations])
        return self._encoded_segment(Origin.OBSERVATION, self._response_text(turn, fitting))

    async def consult(self, call: ToolCall) -> tuple[Observation, str]:
        """Return the observation of a single call and its text, cut to fit. Raises ToolError."""
        observation = await self.environment.call(call)
        return observation, self.shown(call, observation.items)

    def shown(self, call: ToolCall, items: Sequence[Item]) -> str:
        """Return the text of a single call's items, cut to fit."""
        turn = Turn((call,))
        return self._response_text(turn, self.fit(turn, [items]))

    def fit(self, turn: Turn, results: Results) -> Results:
        """Return the best items of each call, equally many, that fit into `max_obs_length` tokens.

        If not even the first item of each call fits, these are cut at a `PIECE`; if their titles
        alone do not fit either, no items are left.
        """
        for count in range(max(map(len, results), default=0), 0, -1):
            first_items = [items[:count] for items in results]
            if self._fits(turn, first_items):
                return first_items
        ends = [[found.end() for item in items[:1] for found in PIECE.finditer(item.text)]
                for items in results]  # fmt: skip
        low, high = 0, max(map(len, ends), default=0)
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(turn, _cut(results, ends, middle)):
                low = middle
            else:
                high = middle - 1
        cut = _cut(results, ends, low)
        return cut if self._fits(turn, cut) else [() for _ in results]

    def _fits(self, turn: Turn, results: Results) -> bool:
        """Whether the response is within its budget.

        A long response is rejected by a prefix with more than twice the tokens of the budget, since
        the whole then exceeds the budget wherever the prefix was cut. Otherwise a longer prefix is
        tried, since some texts have few tokens, such as a run of spaces.
        """
        max_tokens = self.limits.max_obs_length
        total = sum(len(item.text) + len(item.title or "") for items in results for item in items)
        num_chars = CHARS_PER_TOKEN * max_tokens
        while num_chars < total:
            text = self._response_text(turn, _prefix(results, num_chars))
            if count_tokens(self.tokenizer, text) > 2 * max_tokens:
                return False
            num_chars *= 4
        return count_tokens(self.tokenizer, self._response_text(turn, results)) <= max_tokens

    def _response_text(self, turn: Turn, results: Results | None) -> str:
        return self.format.respond(turn, results, self.reserved or ()) + self._opening

    @property
    def _opening(self) -> str:
        """The closed thinking part before each policy turn, if configured."""
        return self.format.closed_think if self.limits.no_think_rl else ""

    def _encoded_segment(self, origin: Origin, text: str) -> Segment:
        return Segment(origin, tuple(self.tokenizer.encode(text, add_special_tokens=False)), text)


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Return the number of tokens of a text within a dialogue."""
    return len(tokenizer.encode(text, add_special_tokens=False))


def derived_seed(*parts: int | str) -> int:
    """Return a 31-bit seed that depends on all parts, such as a trajectory's seed and the turn."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def refuse_closed_think(format: DialogueFormat, no_think_rl: bool) -> None:
    """Raise ConfigError if thinking is disabled for a format with calls inside the thinking."""
    if no_think_rl and format.acts_in_think:
        expected = f"false: template {format.name!r} calls tools inside the thinking part"
        fix = "algorithm.no_think_rl=false, or another template"
        raise ConfigError(explain("algorithm.no_think_rl", True, expected, fix))


def _cut(results: Results, ends: Sequence[Sequence[int]], num_pieces: int) -> Results:
    """Return the first item of each call with at most `num_pieces` pieces of these `ends`."""
    return [
        [replace(item, text=item.text[: max(own[:num_pieces], default=0)]) for item in items[:1]]
        for items, own in zip(results, ends, strict=True)
    ]


def _prefix(results: Results, num_chars: int) -> Results:
    """Return the items that start within the first `num_chars` characters, each cut to these."""
    prefix: list[list[Item]] = []
    total = 0
    for items in results:
        prefix.append([])
        for item in items:
            if total < num_chars:
                title = item.title and item.title[:num_chars]
                prefix[-1].append(replace(item, title=title, text=item.text[:num_chars]))
            total += len(item.text) + len(item.title or "")
    return prefix


def _add_faults(trajectory: Trajectory, faults: Mapping[str, int]) -> None:
    for name, count in faults.items():
        trajectory.faults[name] = trajectory.faults.get(name, 0) + count


def _policy_segment(completion: Completion) -> Segment:
    return Segment(
        Origin.POLICY,
        completion.ids,
        completion.text,
        completion.log_probs,
        completion.weight_version,
    )
