"""The loop of a dialogue: generate to the end of a turn, act, append what comes back, repeat.

One coroutine makes one trajectory. Ids go to the engine as they were sampled and are never
decoded and re-encoded; what the environment adds is encoded once and marked as observation. The
context only grows: when the budget is spent the trajectory ends.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from verl.agent.environment import Environment
from verl.agent.interface import DialogueFormat, Item, Observation, ToolCall, Turn
from verl.engine import RolloutEngine
from verl.errors import ConfigError, ToolError, ToolRefused, explain
from verl.types import Completion, Origin, Sampling, Segment, Status, Trajectory

Found = Sequence[Sequence[Item]]
CHARS_PER_TOKEN = 16
"""More than a tokenizer takes of prose: so much of a document tells that it is too long."""


class Tokenizer(Protocol):
    """What the agent needs of a Hugging Face tokenizer."""

    @property
    def all_special_tokens(self) -> list[str]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


@dataclass(frozen=True)
class Limits:
    """Budgets of one dialogue; all lengths are in tokens."""

    max_turns: int = 2
    """Turns that may call tools; a last turn without follows."""
    max_response_length: int = 500
    """What the policy may sample in one turn."""
    max_obs_length: int = 500
    """One observation, wrapping included."""
    max_prompt_length: int = 4096
    """What the engine may be given at any turn."""
    no_think_rl: bool = False
    """Close the thinking part before the policy starts, on every turn."""


@dataclass(frozen=True)
class DialogueAgent:
    """The `Agent` of every dialogue; it keeps nothing between trajectories."""

    limits: Limits
    format: DialogueFormat
    environment: Environment
    tokenizer: Tokenizer

    def __post_init__(self) -> None:
        """Refuse settings under which no dialogue could go well."""
        refuse_closed_think(self.format, self.limits.no_think_rl)
        turn = Turn(tuple(ToolCall(tool.name, "") for tool in self.environment.tools[:1]))
        for name, found in (
            ("empty observation", [() for _ in turn.calls]),
            ("invalid-action feedback", None),
        ):
            needed = len(self._encode(self._response(turn, found)))
            if needed > self.limits.max_obs_length:
                raise ConfigError(
                    explain(
                        "data.max_obs_length",
                        self.limits.max_obs_length,
                        f"at least {needed} for the {name} of template {self.format.name!r}",
                        f"set data.max_obs_length={needed} or more",
                    )
                )

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        """Play one dialogue to its end; see `verl.agent.interface.Agent`."""
        trajectory = replace(start, segments=list(start.segments), stats={})
        trajectory.faults = dict.fromkeys(self.environment.faults, 0)
        counts: Counter[str] = Counter()
        if self._opening:
            trajectory.segments.append(self._added(Origin.PROMPT, self._opening))
        environment = self.environment
        if self.limits.max_turns:
            environment = environment.for_dialogue(start)
        player = self if environment is self.environment else replace(self, environment=environment)
        try:
            trajectory.status = await player._play(trajectory, engine, sampling, counts)
        except ToolError as error:
            trajectory.status, trajectory.error = Status.FAILED, str(error)
            trajectory.is_refused = isinstance(error, ToolRefused)
            _add_faults(trajectory, error.faults)
        trajectory.stats = {**self._stats(counts, trajectory), **environment.ended()}
        return trajectory

    async def _play(
        self,
        trajectory: Trajectory,
        engine: RolloutEngine,
        sampling: Sampling,
        counts: Counter[str],
    ) -> Status:
        """Take turns until one of them ends the dialogue."""
        for number in range(self.limits.max_turns + 1):
            if trajectory.num_tokens > self.limits.max_prompt_length:
                return Status.OUT_OF_BUDGET
            request = self._request(sampling, trajectory.seed, number)
            is_last = number == self.limits.max_turns
            completion = await self._sample(engine, trajectory.ids, request, is_last)
            trajectory.segments.append(_policy_segment(completion))
            turn = self.format.parse(completion)
            acts = bool(turn.calls) and self.environment.enabled and not is_last
            counts.update(self._counts(completion, turn, acts))
            if turn.answer is not None:
                return Status.ANSWERED
            if is_last:
                return Status.OUT_OF_TURNS
            response = await self._respond(trajectory, turn, acts)
            if trajectory.num_tokens + len(response.ids) > self.limits.max_prompt_length:
                return Status.OUT_OF_BUDGET
            trajectory.segments.append(response)
            counts["observation_tokens"] += len(response.ids)
        raise AssertionError("the last turn always returns")

    async def _sample(
        self, engine: RolloutEngine, ids: Sequence[int], request: Sampling, is_last: bool
    ) -> Completion:
        """One turn; its calls are anticipated while it is sampled, where a tool wants that."""
        if is_last or not self.environment.anticipates:
            return await engine.generate(ids, request)
        heard: list[str] = []

        def listen(text: str) -> None:
            heard.append(text)
            self.environment.anticipate(self.format.begun("".join(heard)))

        return await engine.stream(ids, request, listen)

    def _request(self, sampling: Sampling, seed: int | None, number: int) -> Sampling:
        """This turn's sampling: our stop strings and length, and a seed of its own."""
        return replace(
            sampling,
            max_tokens=self.limits.max_response_length,
            stop=self.format.stop,
            seed=None if seed is None else derived_seed(seed, number),
        )

    def _counts(self, completion: Completion, turn: Turn, acts: bool) -> Counter[str]:
        """What one turn adds to the statistics; `acts`: its calls are carried out."""
        sound = [call for call in turn.calls if self.environment.is_sound(call)]
        is_valid = bool(acts and sound) or turn.answer is not None
        is_malformed = turn.is_malformed or len(sound) < len(turn.calls)
        counts = Counter(
            turns=1,
            valid_actions=int(is_valid),
            invalid_actions=int(not is_valid),
            truncated_turns=int(completion.finish_reason == "length"),
            malformed_turns=int(is_malformed),
        )
        for call in sound:
            tool = self.environment.find(call.tool)
            assert tool is not None, "a sound call names a tool"
            counts.update({tool.metric: 1, f"valid_{tool.metric}": int(acts)})
        return counts

    def _stats(self, counts: Counter[str], trajectory: Trajectory) -> dict[str, float]:
        """Every statistic of a trajectory, zeros included."""
        metrics = [tool.metric for tool in self.environment.tools]
        calls = [name for metric in metrics for name in (metric, f"valid_{metric}")]
        names = ("turns", *calls, "valid_actions", "invalid_actions", "observation_tokens",
                 "truncated_turns", "malformed_turns")  # fmt: skip
        answered = float(trajectory.status is Status.ANSWERED)
        return {**{name: float(counts[name]) for name in names}, "answered": answered}

    async def _respond(self, trajectory: Trajectory, turn: Turn, acts: bool) -> Segment:
        """What the environment answers to calls, or to an invalid action."""
        if not acts:
            return self._added(Origin.OBSERVATION, self._response(turn, None))
        observations = await self.environment.act(turn.calls)
        for observation in observations:
            _add_faults(trajectory, observation.faults)
        fitting = self.fit(turn, [observation.items for observation in observations])
        return self._added(Origin.OBSERVATION, self._response(turn, fitting))

    async def consult(self, call: ToolCall) -> tuple[Observation, str]:
        """Carry out one call outside of a dialogue: what it brought, and that in words, cut to fit.

        Raises ToolError.
        """
        observation, turn = await self.environment.call(call), Turn((call,))
        return observation, self._response(turn, self.fit(turn, [observation.items]))

    def fit(self, turn: Turn, found: Found) -> Found:
        """What of each call's items fits into `max_obs_length` tokens: whole ones, best first.

        Only where not even the first of each fits, these are cut, at a word; and if not even their
        titles fit, nothing is left.
        """
        for count in range(max(map(len, found), default=0), 0, -1):
            some = [items[:count] for items in found]
            if self._fits(turn, some):
                return some
        low, high = 0, max((items[0].text.count(" ") + 1 for items in found if items), default=0)
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(turn, _cut(found, middle)):
                low = middle
            else:
                high = middle - 1
        cut = _cut(found, low)
        return cut if self._fits(turn, cut) else [() for _ in found]

    def _fits(self, turn: Turn, found: Found) -> bool:
        """Whether the response is within its budget; of a long one as little is encoded as tells.

        Where a beginning has twice the tokens of the budget, the whole has more than that, wherever
        the cut fell; a tokenizer that takes few for it, as of a run of spaces, gets more of it.
        """
        most = self.limits.max_obs_length
        total = sum(len(item.text) + len(item.title or "") for items in found for item in items)
        num_chars = CHARS_PER_TOKEN * most
        while num_chars < total:
            if len(self._encode(self._response(turn, _beginning(found, num_chars)))) > 2 * most:
                return False
            num_chars *= 4
        return len(self._encode(self._response(turn, found))) <= most

    def _response(self, turn: Turn, found: Found | None) -> str:
        """The format's words, and what precedes the policy's next turn by configuration."""
        return self.format.respond(turn, found, self.tokenizer.all_special_tokens) + self._opening

    @property
    def _opening(self) -> str:
        return self.format.closed_think if self.limits.no_think_rl else ""

    def _added(self, origin: Origin, text: str) -> Segment:
        return Segment(origin, tuple(self._encode(text)), text)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def derived_seed(*parts: int | str) -> int:
    """A 31-bit seed that depends on every part, such as a trajectory's seed and the turn."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def refuse_closed_think(format: DialogueFormat, no_think_rl: bool) -> None:
    """A dialogue whose calls are part of the thinking cannot do without it."""
    if no_think_rl and format.acts_in_think:
        expected = f"false: template {format.name!r} acts while it thinks"
        fix = "algorithm.no_think_rl=false, or another template"
        raise ConfigError(explain("algorithm.no_think_rl", True, expected, fix))


def _cut(found: Found, num_words: int) -> Found:
    """The first item of each call, with at most so many leading words of its text."""
    return [
        [replace(item, text=" ".join(item.text.split(" ", num_words)[:num_words]))
         for item in items[:1]]
        for items in found
    ]  # fmt: skip


def _beginning(found: Found, num_chars: int) -> Found:
    """The items that begin within so many characters, none of them longer."""
    beginning: list[list[Item]] = []
    total = 0
    for items in found:
        beginning.append([])
        for item in items:
            if total < num_chars:
                title = item.title and item.title[:num_chars]
                beginning[-1].append(replace(item, title=title, text=item.text[:num_chars]))
            total += len(item.text) + len(item.title or "")
    return beginning


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
        completion.weight_versions,
    )
