"""Data passed between components: prompts, trajectories, and the jagged batch that is trained on.

Nothing is padded. A trajectory is a list of segments, each with a single origin; a batch is a set
of flat token tensors with sequence offsets. Masks come from the segments' origins and are never
derived from token ids. This module does not depend on engines, tools, Ray or configuration files.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

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
    truth_form: str = "target"
    """Form of the ground truth in the row: text, list, or target (`{"target": …}`)."""


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
    group: str = ""
    """Name of the prompt instance of this step; all samples of one instance share it."""
    sample: int = 0
    """Number of this sample within the group."""
    seed: int | None = None
    """Base from which the seeds of the requests are derived; None lets the engine choose."""
    error: str = ""
    """Error message if the status is FAILED."""
    is_refused: bool = False
    """Whether a tool refuses this run (`ToolRefused`), so that sampling again would fail again."""
    replica: int = 0
    """Number of the replica that sampled the trajectory."""
    turn_times: list[TurnTimes] = field(default_factory=list)
    """Timestamps of the turns, in order."""

    @property
    def ids(self) -> list[int]:
        """All token ids in order: what the next turn continues, and what is trained on."""
        return [i for segment in self.segments for i in segment.ids]

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
    return Trajectory(prompt, [segment], group=group, sample=sample, seed=seed)


@dataclass
class TokenBatch:
    """A jagged batch of sequences.

    `offsets` (num_seqs + 1,) int64: sequence boundaries in the flat token columns.
    `tokens[name]` (num_tokens,): a tensor with one value per token, aligned with the token that it
    describes: `old_log_probs[t]` is the log-prob of token t given its prefix, and `values[t]` the
    value of the state before token t. `rows[name]` (num_seqs, ...): a tensor with one row per
    sequence. `columns[name]`: a list with one Python object per sequence.

    Example (P prompt, A policy, O observation): ids `P P A A O O A`, policy_mask
    `0 0 1 1 0 0 1`; losses, advantages and KL are defined at the three A tokens only.
    """

    offsets: Tensor
    tokens: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, column in self.tokens.items():
            assert len(column) == self.num_tokens, f"{name}: {len(column)} != {self.num_tokens}"
        sized: dict[str, Sized] = {**self.rows, **self.columns}
        for name, row in sized.items():
            assert len(row) == len(self), f"{name}: {len(row)} rows, expected {len(self)}"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> Tensor:
        """(num_seqs,) number of tokens of each sequence."""
        return self.offsets.diff()

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> TokenBatch:
        """Flatten trajectories into a batch; adds the columns `group` and `data_source`."""
        segments = [s for t in trajectories for s in t.segments]
        segment_lengths = np.array([s.num_tokens for s in segments], dtype=np.int64)
        segment_origins = np.array([s.origin for s in segments], dtype=np.int8)
        versions = np.array([s.weight_version for s in segments], dtype=np.int32)
        ids, log_probs = (
            np.frombuffer(b"".join(s.column_bytes(name) for s in segments), Segment.TYPECODES[name])
            for name in ("ids", "log_probs")
        )
        origin = torch.from_numpy(segment_origins.repeat(segment_lengths))
        is_policy = origin == int(Origin.POLICY)
        rollout_log_probs = torch.zeros(len(origin))
        rollout_log_probs[is_policy] = torch.from_numpy(log_probs.astype(np.float32))
        first_segments = np.cumsum([0, *(len(t.segments) for t in trajectories)])
        return cls(
            offsets=torch.from_numpy(np.cumsum([0, *segment_lengths])[first_segments]),
            tokens={
                "input_ids": torch.from_numpy(ids.astype(np.int64)),
                "policy_mask": is_policy,
                "response_mask": origin != int(Origin.PROMPT),
                "rollout_log_probs": rollout_log_probs,
                "weight_versions": torch.from_numpy(versions.repeat(segment_lengths)),
            },
            columns={
                "group": [t.group for t in trajectories],
                "data_source": [t.prompt.data_source for t in trajectories],
            },
        )

    def spans(self, indices: Sequence[int]) -> list[slice]:
        """Return the slices of the flat columns that hold the sequences at `indices`."""
        bounds = self.offsets.tolist()
        return [slice(bounds[i], bounds[i + 1]) for i in indices]

    def positions(self, indices: Sequence[int]) -> Tensor:
        """Return the flat positions of all tokens of the sequences at `indices`, in that order."""
        spans = [torch.arange(span.start, span.stop) for span in self.spans(indices)]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

    def select(self, indices: Sequence[int]) -> TokenBatch:
        """Return a new batch of the sequences at `indices`, in that order."""
        index = list(indices)
        spans = self.spans(index)
        lengths = self.lengths[index] if index else torch.zeros(0, dtype=torch.int64)
        return TokenBatch(
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            tokens={name: concat_slices(column, spans) for name, column in self.tokens.items()},
            rows={name: row[index] for name, row in self.rows.items()},
            columns={name: [col[i] for i in index] for name, col in self.columns.items()},
        )

    def __getstate__(self) -> dict[str, Any]:
        # Ray transfers NumPy arrays without a copy; pickling a tensor copies it several times.
        return {
            "offsets": self.offsets.numpy(),
            "columns": self.columns,
            "tokens": {name: x.numpy() for name, x in self.tokens.items()},
            "rows": {name: x.numpy() for name, x in self.rows.items()},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # `torch.tensor` copies: the arrays that Ray passes on are read-only.
        self.offsets = torch.tensor(state["offsets"])
        self.columns = state["columns"]
        self.tokens = {name: torch.tensor(x) for name, x in state["tokens"].items()}
        self.rows = {name: torch.tensor(x) for name, x in state["rows"].items()}

    def sequences(self, name: str) -> Iterator[Tensor]:
        """Iterate over the token column `name`, one view per sequence."""
        return iter(torch.split(self.tokens[name], self.lengths.tolist()))


def concat_slices(column: Tensor, spans: Sequence[slice]) -> Tensor:
    """Concatenate slices of a CPU tensor into a new tensor."""
    if column.requires_grad:
        return torch.cat([column[:0], *(column[span] for span in spans)])
    flat = column.numpy()  # slicing an array is cheaper than slicing a tensor
    return torch.from_numpy(np.concatenate([flat[:0], *(flat[span] for span in spans)]))


def num_calls(stats: Mapping[str, float]) -> float:
    """Return the number of turns that called tools: all valid actions except the answer."""
    return stats.get("valid_actions", 0.0) - stats.get("answered", 0.0)
