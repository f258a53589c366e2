"""The data that travels: prompts, trajectories, and the jagged batch that trainers work on.

Nothing here is padded. A trajectory is a list of segments, each of one origin; a batch is flat
token tensors with sequence offsets. Masks are data that come from the origin, never derived from
token ids. This module knows nothing of engines, tools, Ray or configuration files.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

Metrics = dict[str, float]
"""Numbers of one step, by the name they are logged under."""
TrajectoryKey = tuple[str, int, bool]
"""What tells a trajectory from the others: its group, its number there, and whether it is greedy
(ReMax's baseline)."""


class Origin(IntEnum):
    """Where a token came from; only POLICY tokens are ever trained on."""

    PROMPT = 0
    POLICY = 1
    OBSERVATION = 2


class Status(StrEnum):
    """How a trajectory ended."""

    ANSWERED = "answered"
    """The policy closed an answer."""
    OUT_OF_TURNS = "out_of_turns"
    """The last turn was spent without an answer."""
    OUT_OF_BUDGET = "out_of_budget"
    """The context budget could not hold another turn."""
    FAILED = "failed"
    """Infrastructure failed (a tool or an engine); never trained on."""


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled; `temperature` 0 means greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class EngineCounts:
    """Tokens that an engine did not compute, or guessed, in one request or several; all 0 where it
    does not tell."""

    prompt: int = 0
    """Of the prompt, which is the dialogue so far."""
    cached: int = 0
    """Of those, in its prefix cache already."""
    drafted: int = 0
    """Guessed (`rollout.speculative_config`), by the engine since the request that ended before."""
    accepted: int = 0
    """Of those, taken."""

    def __add__(self, other: EngineCounts) -> EngineCounts:
        return EngineCounts(**{k: v + getattr(other, k) for k, v in vars(self).items()})


@dataclass(frozen=True)
class Completion:
    """What an engine generated for one request: ids as sampled, their log-probs, and the text."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str
    finish_reason: str
    """`stop` (a stop string or end of sequence), `length`, or `verl.engine.INTERRUPTED`."""
    weight_version: int = 0
    """Of the weights that sampled it; the last ones where several did."""
    weight_versions: tuple[int, ...] = ()
    """Of each token, where several did."""
    queued_s: float = 0.0
    """Seconds that the request waited in the engine for a slot; 0 where an engine does not tell."""
    counts: EngineCounts = EngineCounts()


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, rendered: the token ids to start from and what judges the answer."""

    uid: str
    """Unique over all data sets: `file#row`. Groups are formed by prompt instance, not by this."""
    ids: tuple[int, ...]
    data_source: str
    ground_truth: tuple[str, ...]
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    """What `ids` were made of, the chat template's words included."""


@dataclass(frozen=True)
class Segment:
    """A run of tokens of one origin. `log_probs` are the engine's, for policy tokens only.

    Its numbers travel between processes as `NUMBERS` says, and become tuples when they are read:
    a step's are millions, of which the trainer's batch takes the bytes as they are.
    """

    NUMBERS: ClassVar[Mapping[str, str]] = {"ids": "i", "log_probs": "d", "weight_versions": "i"}
    """The columns that are packed, and the `array` that each is packed in."""
    packed: ClassVar[Mapping[str, bytes]] = {}
    """Of a segment that came from another process, the bytes of each."""

    origin: Origin
    ids: tuple[int, ...]
    text: str = ""
    log_probs: tuple[float, ...] = ()
    weight_version: int = 0
    weight_versions: tuple[int, ...] = ()
    """As those of a completion."""

    @property
    def version_runs(self) -> list[tuple[int, int]]:
        """(version, number of tokens) of each stretch that the same weights sampled, in order."""
        runs = [(v, len(list(same))) for v, same in itertools.groupby(self.weight_versions)]
        return runs or [(self.weight_version, self.num_tokens)]

    @property
    def num_tokens(self) -> int:
        """How many there are, whether or not they were read."""
        return len(self.packed["ids"]) // ID_BYTES if self.packed else len(self.ids)

    def bytes_of(self, name: str) -> bytes:
        """A column of `NUMBERS`, packed."""
        found = self.packed.get(name)
        return array(self.NUMBERS[name], getattr(self, name)).tobytes() if found is None else found

    def __getstate__(self) -> dict[str, Any]:
        packed = {name: self.bytes_of(name) for name in self.NUMBERS}
        return {k: v for k, v in vars(self).items() if k not in packed} | {"packed": packed}

    def __post_init__(self) -> None:
        expected = len(self.ids) if self.origin is Origin.POLICY else 0
        assert len(self.log_probs) == expected, (
            f"a {self.origin.name} segment of {len(self.ids)} ids carries {expected} log-probs, "
            f"got {len(self.log_probs)}"
        )
        assert len(self.weight_versions) in (0, len(self.ids)), "a version for each token, or none"


@dataclass(frozen=True)
class _Numbers:
    """A column of a packed segment: what is not among its attributes yet, and is from then on."""

    name: str

    def __get__(self, segment: Segment | None, _: type[Segment]) -> Any:
        if segment is None:
            return self
        found = tuple(array(segment.NUMBERS[self.name], segment.packed[self.name]))
        segment.__dict__[self.name] = found
        return found


for _name in Segment.NUMBERS:
    setattr(Segment, _name, _Numbers(_name))
ID_BYTES = array(Segment.NUMBERS["ids"]).itemsize


@dataclass(frozen=True)
class TurnTimes:
    """When a turn was asked for, had the weights that it waited for, and ended; seconds since the
    epoch, by the clock of the replica's machine. Of a turn that new weights cut, one for each part.
    """

    requested: float
    started: float
    finished: float
    turn: int = 0
    """The number of the turn."""
    queued_s: float = 0.0
    """Seconds from its begin in which the engine had no slot for it."""
    counts: EngineCounts = EngineCounts()


@dataclass
class Trajectory:
    """One dialogue: the prompt and what policy and environment added to it, segment by segment."""

    prompt: Prompt
    segments: list[Segment]
    status: Status = Status.OUT_OF_TURNS
    stats: dict[str, float] = field(default_factory=dict)
    """Counts of the agent's own making (turns, valid actions ...), averaged into metrics."""
    faults: dict[str, int] = field(default_factory=dict)
    """Counts of what infrastructure did to it (calls tried again ...), summed to `fault/`."""
    group: str = ""
    """The prompt instance of this step; samples of one instance share it."""
    sample: int = 0
    """Which of the group's samples this is."""
    seed: int | None = None
    """Base of the seeds of this trajectory's requests; None leaves the choice to the engine."""
    error: str = ""
    """What failed, when status is FAILED."""
    is_refused: bool = False
    """A tool refuses this run (`ToolRefused`): sampled again it would fail again."""
    replica: int = 0
    """Which of the run's replicas sampled it."""
    turn_times: list[TurnTimes] = field(default_factory=list)
    """Of its turns, in order."""

    @property
    def ids(self) -> list[int]:
        """All token ids in order: what the engine is given next, and what is trained on."""
        return [i for segment in self.segments for i in segment.ids]

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)

    @property
    def num_policy_tokens(self) -> int:
        return self.num_tokens_of(Origin.POLICY)

    def num_tokens_of(self, origin: Origin) -> int:
        """Tokens of one origin."""
        return sum(s.num_tokens for s in self.segments if s.origin is origin)

    @property
    def text(self) -> str:
        """The dialogue after the prompt, for people."""
        return "".join(s.text for s in self.segments if s.origin is not Origin.PROMPT)


def start_trajectory(
    prompt: Prompt, group: str = "", sample: int = 0, seed: int | None = None
) -> Trajectory:
    """A trajectory that holds its prompt only."""
    segment = Segment(Origin.PROMPT, prompt.ids, prompt.text)
    return Trajectory(prompt, [segment], group=group, sample=sample, seed=seed)


@dataclass
class TokenBatch:
    """A jagged batch.

    `offsets` (num_seqs + 1,) int64 delimit sequences in the flat token columns.
    `tokens[name]` (num_tokens,): every column is aligned with the token it concerns, so
    `old_log_probs[t]` is the log-prob of token t given its prefix and `values[t]` the value of
    the state before token t. `rows[name]` (num_seqs, ...) tensors; `columns[name]` lists of
    num_seqs Python objects.

    Example (P prompt, A policy, O observation): ids `P P A A O O A`, policy_mask
    `0 0 1 1 0 0 1`; losses, advantages and KL exist at the three A tokens only.
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
        """(num_seqs,) tokens per sequence."""
        return self.offsets.diff()

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> TokenBatch:
        """Flatten trajectories; columns `group` and `data_source` go along for every row."""
        segments = [s for t in trajectories for s in t.segments]
        counts = np.array([s.num_tokens for s in segments], dtype=np.int64)
        origins = np.array([s.origin for s in segments], dtype=np.int8)
        runs = np.array([r for s in segments for r in s.version_runs], dtype=np.int64)
        versions, lengths = runs.reshape(-1, 2).T
        ends = np.cumsum([0, *(len(t.segments) for t in trajectories)])
        origin = torch.from_numpy(origins.repeat(counts))
        ids, log_probs = (
            np.frombuffer(b"".join([s.bytes_of(name) for s in segments]), Segment.NUMBERS[name])
            for name in ("ids", "log_probs")
        )
        is_policy = origin == int(Origin.POLICY)
        sampled = torch.zeros(len(origin))
        sampled[is_policy] = torch.from_numpy(log_probs.astype(np.float32))
        return cls(
            offsets=torch.from_numpy(np.cumsum([0, *counts])[ends]),
            tokens={
                "input_ids": torch.from_numpy(ids.astype(np.int64)),
                "policy_mask": is_policy,
                "response_mask": origin != int(Origin.PROMPT),
                "rollout_log_probs": sampled,
                "weight_versions": torch.from_numpy(versions.astype(np.int32).repeat(lengths)),
            },
            columns={
                "group": [t.group for t in trajectories],
                "data_source": [t.prompt.data_source for t in trajectories],
            },
        )

    def spans(self, indices: Sequence[int]) -> list[slice]:
        """Where in the flat columns the sequences at `indices` are."""
        bounds = self.offsets.tolist()
        return [slice(bounds[i], bounds[i + 1]) for i in indices]

    def positions(self, indices: Sequence[int]) -> Tensor:
        """Flat positions of the tokens of the sequences at `indices`, in that order."""
        spans = [torch.arange(span.start, span.stop) for span in self.spans(indices)]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

    def select(self, indices: Sequence[int]) -> TokenBatch:
        """The sequences at `indices`, in that order."""
        index = list(indices)
        spans = self.spans(index)
        lengths = self.lengths[index] if index else torch.zeros(0, dtype=torch.int64)
        return TokenBatch(
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            tokens={name: joined(column, spans) for name, column in self.tokens.items()},
            rows={name: row[index] for name, row in self.rows.items()},
            columns={name: [col[i] for i in index] for name, col in self.columns.items()},
        )

    def __getstate__(self) -> dict[str, Any]:
        # Ray moves the bytes of numpy's arrays as they are; torch copies a tensor's several times.
        flat = {kind: {name: x.numpy() for name, x in vars(self)[kind].items()} for kind in KINDS}
        return {"offsets": self.offsets.numpy(), "columns": self.columns, **flat}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.offsets, self.columns = torch.tensor(state["offsets"]), state["columns"]
        for kind in KINDS:  # copied: what Ray gives cannot be written to
            setattr(self, kind, {name: torch.tensor(x) for name, x in state[kind].items()})

    def sequences(self, name: str) -> Iterator[Tensor]:
        """The token column `name`, one view per sequence."""
        return iter(torch.split(self.tokens[name], self.lengths.tolist()))


KINDS = ("tokens", "rows")
"""The tensors of a batch, by name."""


def joined(column: Tensor, spans: Sequence[slice]) -> Tensor:
    """Those parts of a column of the host, in that order, as a tensor of its own."""
    if column.requires_grad:
        return torch.cat([column[:0], *(column[span] for span in spans)])
    flat = column.numpy()  # whose slices cost less than a tensor's
    return torch.from_numpy(np.concatenate([flat[:0], *(flat[span] for span in spans)]))
