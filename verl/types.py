"""Data passed between components: prompts and trajectories.

A trajectory is a list of segments, each with a single origin; `verl.batch` makes the tensors that
are trained on. This module does not depend on torch, engines, tools, Ray or configuration files.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from itertools import pairwise
from typing import Any, ClassVar

Metrics = dict[str, float]
"""Metrics of one step, keyed by the name under which they are logged."""
TrajectoryKey = tuple[str, int]
"""Identifies a trajectory of a run: its group, and its number in the group."""


class Origin(IntEnum):
    """Where a token comes from; only POLICY tokens are trained on."""

    PROMPT = 0
    POLICY = 1
    OBSERVATION = 2


class Status(StrEnum):
    """How a trajectory ended."""

    ANSWERED = "answered"
    """The policy gave a complete answer."""
    OUT_OF_TURNS = "out_of_turns"
    """The last turn ended without an answer."""
    OUT_OF_BUDGET = "out_of_budget"
    """The context budget had no space for another turn."""
    FAILED = "failed"
    """Infrastructure failed (a tool or an engine); never trained on."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request; `temperature` 0 means greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Measured:
    """What an engine measured of requests; 0 if it does not report it."""

    queued_s: float = 0.0
    """Seconds that they waited for a slot in the engine."""
    num_prompt: int = 0
    """Prompt tokens, that is, the dialogue so far."""
    num_cached: int = 0
    """Prompt tokens that were already in the prefix cache."""

    def __add__(self, other: Measured) -> Measured:
        return Measured(
            self.queued_s + other.queued_s,
            self.num_prompt + other.num_prompt,
            self.num_cached + other.num_cached,
        )


@dataclass(frozen=True)
class Completion:
    """Output of one engine request: the sampled ids, their log-probs, and the text."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str
    finish_reason: str
    """`stop` (a stop string or end of sequence) or `length`."""
    weight_version: int = 0
    """Version of the weights that sampled the completion."""
    measured: Measured = Measured()


@dataclass(frozen=True)
class Prompt:
    """One data set row as a prompt: its token ids and what is needed to score the answer."""

    uid: str
    """Unique over all data sets: `file#row`. Not the group: a step may draw the same row twice."""
    ids: tuple[int, ...]
    data_source: str
    ground_truth: tuple[str, ...]
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    """The text that was encoded to `ids`, including the chat template."""
    row_truth: Any = None
    """The ground truth as the row has it, a text, list or object; None for `{"target": […]}` with
    just the answers of `ground_truth`, as most rows have it."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one origin. `log_probs` are the engine's, for policy tokens only.

    Pickling packs the columns of `TYPECODES` into bytes, which are unpacked to tuples on first
    access: a step has millions of tokens, and `TokenBatch.from_trajectories` reads packed bytes.
    """

    TYPECODES: ClassVar[Mapping[str, str]] = {"ids": "i", "log_probs": "d"}
    """The numeric columns, and the type code of the `array` into which each is packed."""
    packed: ClassVar[Mapping[str, bytes]] = {}
    """Packed bytes of each column, set when the segment was unpickled."""

    origin: Origin
    ids: tuple[int, ...]
    text: str = ""
    log_probs: tuple[float, ...] = ()
    weight_version: int = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens; does not unpack the segment."""
        return len(self.packed["ids"]) // ID_BYTES if self.packed else len(self.ids)

    def column_bytes(self, name: str) -> bytes:
        """Return the column `name` of `TYPECODES` as packed bytes."""
        if name in self.packed:
            return self.packed[name]
        return array(self.TYPECODES[name], getattr(self, name)).tobytes()

    def as_prompt(self) -> Segment:
        """Return the segment as one that a further row begins with, and that is not trained on."""
        return replace(self, origin=Origin.PROMPT, log_probs=())

    def __getstate__(self) -> dict[str, Any]:
        packed = {name: self.column_bytes(name) for name in self.TYPECODES}
        return {k: v for k, v in vars(self).items() if k not in packed} | {"packed": packed}

    def __post_init__(self) -> None:
        expected = len(self.ids) if self.origin is Origin.POLICY else 0
        assert len(self.log_probs) == expected, (
            f"a {self.origin.name} segment of {len(self.ids)} ids has {expected} log-probs, "
            f"got {len(self.log_probs)}"
        )


@dataclass(frozen=True)
class _UnpackedColumn:
    """Descriptor that unpacks a column of a `Segment` on first access and stores it there.

    Without `__set__`, an instance attribute of the same name takes precedence: later accesses, and
    segments that were never pickled, do not come here.
    """

    name: str

    def __get__(self, segment: Segment | None, _: type[Segment]) -> Any:
        if segment is None:
            return self
        values = tuple(array(segment.TYPECODES[self.name], segment.packed[self.name]))
        segment.__dict__[self.name] = values  # not by attribute: the dataclass is frozen
        return values


# Added after `dataclass` ran, which would otherwise take the descriptors for field defaults.
for _name in Segment.TYPECODES:
    setattr(Segment, _name, _UnpackedColumn(_name))
ID_BYTES = array(Segment.TYPECODES["ids"]).itemsize


@dataclass(frozen=True)
class TurnTimes:
    """Timestamps of one turn, in seconds since the epoch by the clock of the replica's machine."""

    requested: float
    started: float
    """When the weights that the turn waited for were loaded."""
    finished: float
    turn: int = 0
    """Number of the turn within the dialogue, from 0."""
    measured: Measured = Measured()
    """Of its request, which was made when the turn started."""


@dataclass(frozen=True)
class Timeline:
    """Where a trajectory was sampled, and when."""

    replica: int = 0
    """Number of the replica that sampled it."""
    turns: Sequence[TurnTimes] = ()
    """Timestamps of its turns, in order; none where nobody measured them."""


@dataclass(frozen=True)
class Draw:
    """Which of a run's samples a trajectory is."""

    group: str = ""
    """Name of the prompt instance of this step; all samples of one instance share it."""
    sample: int = 0
    """Number of this sample within the group."""
    seed: int | None = None
    """Base from which the seeds of the requests are derived; None lets the engine choose."""


@dataclass(frozen=True)
class Failure:
    """Why a trajectory failed."""

    message: str
    is_final: bool = False
    """Whether a tool refuses this run (`ToolRefused`), so that sampling again would fail again."""


@dataclass
class Trajectory:
    """One dialogue: the prompt, followed by segments added by the policy and the environment."""

    prompt: Prompt
    segments: list[Segment]
    status: Status = Status.OUT_OF_TURNS
    stats: dict[str, float] = field(default_factory=dict)
    """Statistics of the agent (turns, valid actions ...), averaged into metrics."""
    faults: dict[str, float] = field(default_factory=dict)
    """Counts of infrastructure faults (retried calls ...), summed into the metrics `fault/NAME`."""
    draw: Draw = Draw()
    failure: Failure | None = None
    """Why it failed, if the status is FAILED."""
    timeline: Timeline = Timeline()

    def fail(self, message: str, is_final: bool = False) -> None:
        """End the trajectory as FAILED, with the arguments of `Failure`."""
        self.status, self.failure = Status.FAILED, Failure(message, is_final)

    @property
    def error(self) -> str:
        """Message of the failure; empty if there is none."""
        return "" if self.failure is None else self.failure.message

    @property
    def group(self) -> str:
        """Name of the group that the trajectory is a sample of."""
        return self.draw.group

    @property
    def sample(self) -> int:
        """Number of this sample within the group."""
        return self.draw.sample

    @property
    def seed(self) -> int | None:
        """Base from which the seeds of the requests are derived; None lets the engine choose."""
        return self.draw.seed

    @property
    def key(self) -> TrajectoryKey:
        """What identifies the trajectory in its run."""
        return self.draw.group, self.draw.sample

    @property
    def ids(self) -> list[int]:
        """All token ids in order: what is trained on."""
        return [i for segment in self.segments for i in segment.ids]

    @property
    def row_starts(self) -> list[int]:
        """Numbers of the segments that begin a further row: prompts after what the policy sampled.

        A row sees nothing before it.
        """
        origins = [segment.origin for segment in self.segments]
        further = (Origin.POLICY, Origin.PROMPT)
        return [i for i, pair in enumerate(pairwise(origins), 1) if pair == further]

    @property
    def row(self) -> list[Segment]:
        """The segments that the next turn continues: all, or the last row of several."""
        starts = self.row_starts
        return self.segments[starts[-1] :] if starts else self.segments

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def num_policy_tokens(self) -> int:
        return self.num_tokens_of(Origin.POLICY)

    def num_tokens_of(self, origin: Origin) -> int:
        """Number of tokens of one origin."""
        return sum(s.num_tokens for s in self.segments if s.origin is origin)

    @property
    def text(self) -> str:
        """Human-readable text of the dialogue after the prompt."""
        return "".join(s.text for s in self.segments if s.origin is not Origin.PROMPT)


def start_trajectory(
    prompt: Prompt, group: str = "", sample: int = 0, seed: int | None = None
) -> Trajectory:
    """Return a trajectory that contains only its prompt."""
    segment = Segment(Origin.PROMPT, prompt.ids, prompt.text)
    return Trajectory(prompt, [segment], draw=Draw(group, sample, seed))


def num_calls(stats: Mapping[str, float]) -> float:
    """Return the number of turns that called tools: all valid actions except the answer."""
    return stats.get("valid_actions", 0.0) - stats.get("answered", 0.0)
