"""A crew: ranks that compute a row of tokens together, each a slice of it.

That is DeepSpeed's Ulysses (Jacobs et al. 2023). Norms, matrices and the head are by token: each
rank computes them for its slice alone. Attention is by head: before it the ranks exchange tokens
for heads, so that each has the whole row of its share of the heads; after it they exchange back.
Parameters are sharded over all ranks, whatever their crews: a rank's gradient is what its slice
adds, and all ranks add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from verl.errors import ConfigError, explain
from verl.training.devices import sent


@dataclass(frozen=True)
class Crew:
    """`size` ranks with neighbouring numbers, of which this one is the `place`th, from 0."""

    size: int
    place: int
    group: Any = None
    """Their process group."""

    @classmethod
    def join(cls, size: int) -> Crew:
        """This rank's crew; every rank of the world must call it. The world is whole crews."""
        group, _ = dist.new_subgroups(size)
        return cls(size, dist.get_rank(group), group)

    def slice_size(self, num_tokens: int) -> int:
        """Tokens of each slice of a row of `num_tokens`; the last ones may be no token's."""
        return -(-num_tokens // self.size)

    def own(self, row: Tensor) -> Tensor:
        """This rank's slice of a row (1, num_tokens), filled up with zeros: (1, slice_size)."""
        size = self.slice_size(row.shape[1])
        return self.filled(row[0]).view(self.size, size)[self.place][None]

    def filled(self, x: Tensor) -> Tensor:
        """`x` (num_tokens, …) with zeros for the tokens that its last slices lack."""
        missing = self.size * self.slice_size(len(x)) - len(x)
        return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x

    def to_heads(self, parts: Sequence[Tensor], num_tokens: int) -> list[Tensor]:
        """From all heads of this rank's slice to the whole row of this rank's heads, at once.

        `parts` are queries, keys and values, (slice_size, heads, head_dim) each; answers
        (num_tokens, heads // size, head_dim). Key-value heads that do not go round are repeated.
        """
        copies = [self.size // gcd(x.shape[1], self.size) for x in parts]
        parts = [
            x.repeat_interleave(n, 1) if n > 1 else x for x, n in zip(parts, copies, strict=True)
        ]
        by_rank = [x.unflatten(1, (self.size, -1)).flatten(2).transpose(0, 1) for x in parts]
        found = self.exchange(torch.cat(by_rank, dim=2)).flatten(0, 1)[:num_tokens]
        mine = found.split([x.shape[2] for x in by_rank], dim=1)
        return [y.unflatten(1, (-1, x.shape[2])) for x, y in zip(parts, mine, strict=True)]

    def to_slice(self, x: Tensor) -> Tensor:
        """The way back: from (num_tokens, heads // size, head_dim) to (slice_size, heads, …)."""
        rows = self.filled(x).unflatten(0, (self.size, -1))
        return self.exchange(rows).transpose(0, 1).flatten(1, 2)

    def exchange(self, x: Tensor) -> Tensor:
        """`x` (size, …) with its row i given to rank i, and the rows that this rank is given."""
        found: Tensor = _Exchange.apply(x.contiguous(), self.group)  # type: ignore[no-untyped-call]
        return found

    def add_up(self, x: Tensor) -> None:
        """Put the sum over the ranks into `x`."""
        dist.all_reduce(x, group=self.group)


def check_heads(model: PretrainedConfig, size: int, section: str) -> None:
    """Raise ConfigError for query heads that `size` ranks cannot share evenly; `section` has the
    option."""
    heads = model.get_text_config().num_attention_heads
    if heads % size:
        key = f"{section}.ulysses_sequence_parallel_size"
        most = max(n for n in range(1, size) if heads % n == 0)
        expected = f"a divisor of the model's {heads} attention heads, which the ranks share"
        raise ConfigError(explain(key, size, expected, f"{key}={most}"))


class _Exchange(torch.autograd.Function):
    """Rows given to each other; gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        found = torch.empty_like(x)
        dist.all_to_all_single(found, x, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(gradient.contiguous(), ctx.group), None  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Answers:
    """Which rank of a crew answers for which of the tokens that a forward is asked for."""

    crew: Crew
    counts: list[int]
    """How many each rank answers for."""
    order: Tensor
    """(num_targets,) where each token's answer is among those of all ranks, in a row."""

    @classmethod
    def of(cls, crew: Crew, places: Tensor, device: torch.device) -> tuple[Answers, Tensor]:
        """`places` (num_targets,) say which rank answers; also which targets this one's are."""
        by_rank = places.argsort(stable=True)
        counts = places.bincount(minlength=crew.size).tolist()
        return cls(crew, counts, sent(by_rank.argsort(), device)), by_rank.split(counts)[crew.place]

    def gathered(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """The answers of all, (num_targets,) each, where this rank's are `columns`, (count,) each.
        The gradient is that of this rank's alone: the others add what their answers do."""
        own = torch.stack(columns)
        found = own.new_zeros(len(columns), sum(self.counts))
        parts = list(found.split(self.counts, dim=1))
        parts[self.crew.place].copy_(own.detach())
        self.crew.add_up(found)  # to zeros
        parts[self.crew.place] = own
        return tuple(column[self.order] for column in torch.cat(parts, dim=1))
