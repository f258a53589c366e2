"""The jagged batch that is trained on: flat token tensors with sequence offsets.

Nothing is padded. Masks come from the origins of the trajectories' segments and are never derived
from token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.types import Origin, Segment, Trajectory

ROW_STARTS = "row_starts"
"""Token column: whether a further row of its sequence begins, which sees nothing before it. It only
exists if there are any."""


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
        starts = np.cumsum([0, *segment_lengths])
        tokens = {
            "input_ids": torch.from_numpy(ids.astype(np.int64)),
            "policy_mask": is_policy,
            "response_mask": origin != int(Origin.PROMPT),
            "rollout_log_probs": rollout_log_probs,
            "weight_versions": torch.from_numpy(versions.repeat(segment_lengths)),
        }
        firsts = zip(trajectories, first_segments.tolist(), strict=False)
        if further := [first + i for t, first in firsts for i in t.row_starts]:
            tokens[ROW_STARTS] = torch.zeros(len(origin), dtype=torch.bool)
            tokens[ROW_STARTS][starts[further]] = True
        return cls(
            offsets=torch.from_numpy(starts[first_segments]),
            tokens=tokens,
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
