"""Sequence parallelism: several ranks compute one packed row of tokens, each a slice of it.

The method is DeepSpeed's Ulysses (Jacobs et al. 2023). Norms, linear layers and the head work
token by token, so each rank computes them for its slice alone. Attention works head by head:
before it, an all-to-all gives each rank the whole row for its share of the heads; after it,
another all-to-all restores the slices. Parameters are sharded over all ranks, independently of
the sequence-parallel groups: a rank's gradient is the contribution of its slice, and FSDP sums
the contributions of all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from verl.errors import ConfigError, explain
from verl.training.devices import to_device


@dataclass(frozen=True)
class SequenceParallelGroup:
    """`size` neighbouring ranks that compute the same rows together."""

    size: int
    rank: int
    """This process's rank within the group, from 0."""
    process_group: Any = None

    @classmethod
    def join(cls, size: int) -> Self:
        """Create groups of `size` ranks, which divides the world size; every rank must call it."""
        process_group, _ = dist.new_subgroups(size)
        return cls(size, dist.get_rank(process_group), process_group)

    def slice_size(self, num_tokens: int) -> int:
        """Return the tokens per slice of a row of `num_tokens`; the last slices may be padded."""
        return -(-num_tokens // self.size)

    def local_slice(self, row: Tensor) -> Tensor:
        """Return this rank's slice of `row` (1, num_tokens), padded with zeros: (1, slice_size)."""
        return self.pad(row[0]).view(self.size, -1)[self.rank][None]

    def pad(self, x: Tensor) -> Tensor:
        """Append zeros to `x` (num_tokens, …) until it divides into equal slices."""
        missing = self.size * self.slice_size(len(x)) - len(x)
        return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x

    def slice_to_heads(self, tensors: Sequence[Tensor], num_tokens: int) -> list[Tensor]:
        """Exchange this rank's slice of all heads for the whole row of this rank's heads.

        `tensors` are queries, keys and values, (slice_size, heads, head_dim) each; returns
        (num_tokens, heads // size, head_dim) each, by a single all-to-all. Key-value heads that
        do not divide evenly over the ranks are repeated.
        """
        copies = [self.size // gcd(x.shape[1], self.size) for x in tensors]
        tensors = [
            x.repeat_interleave(n, 1) if n > 1 else x for x, n in zip(tensors, copies, strict=True)
        ]
        by_rank = [x.unflatten(1, (self.size, -1)).flatten(2).transpose(0, 1) for x in tensors]
        row = self.all_to_all(torch.cat(by_rank, dim=2)).flatten(0, 1)[:num_tokens]
        own_heads = row.split([x.shape[2] for x in by_rank], dim=1)
        return [y.unflatten(1, (-1, x.shape[2])) for x, y in zip(tensors, own_heads, strict=True)]

    def heads_to_slice(self, x: Tensor) -> Tensor:
        """Invert `slice_to_heads`: (num_tokens, heads // size, …) to (slice_size, heads, …)."""
        slices = self.pad(x).unflatten(0, (self.size, -1))
        return self.all_to_all(slices).transpose(0, 1).flatten(1, 2)

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send row i of `x` (size, …) to rank i and return the rows received; differentiable."""
        received: Tensor = _AllToAll.apply(x.contiguous(), self.process_group)  # type: ignore[no-untyped-call]
        return received

    def all_reduce(self, x: Tensor) -> None:
        """Sum `x` over the group's ranks, in place."""
        dist.all_reduce(x, group=self.process_group)


def check_heads(model: PretrainedConfig, size: int, section: str) -> None:
    """Raise ConfigError, for the option of `section`, unless heads divide evenly over the ranks."""
    heads = model.get_text_config().num_attention_heads
    if heads % size:
        key = f"{section}.ulysses_sequence_parallel_size"
        largest = max(n for n in range(1, size) if heads % n == 0)
        expected = f"a divisor of the model's {heads} attention heads, which the ranks share"
        raise ConfigError(explain(key, size, expected, f"{key}={largest}"))


class _AllToAll(torch.autograd.Function):
    """An all-to-all whose backward is the same all-to-all of the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, process_group: Any) -> Tensor:
        ctx.process_group = process_group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=process_group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient.contiguous(), ctx.process_group), None  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class TargetGather:
    """Collects per-target results, each of which one rank of the group has computed."""

    sp_group: SequenceParallelGroup
    counts: list[int]
    """Number of targets that each rank computes."""
    order: Tensor
    """(num_targets,) index of each target's result in the concatenation of all ranks' results."""

    @classmethod
    def of(
        cls, sp_group: SequenceParallelGroup, ranks: Tensor, device: torch.device
    ) -> tuple[Self, Tensor]:
        """Build it from each target's rank, (num_targets,); also return this rank's indices."""
        by_rank = ranks.argsort(stable=True)
        counts = ranks.bincount(minlength=sp_group.size).tolist()
        own = by_rank.split(counts)[sp_group.rank]
        return cls(sp_group, counts, to_device(by_rank.argsort(), device)), own

    def gather(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Return all ranks' results, (num_targets,) each, from this rank's `columns` (count,).

        The gradient reaches this rank's results only; the other ranks add the gradients of theirs.
        """
        own = torch.stack(columns)
        results = own.new_zeros(len(columns), sum(self.counts))
        by_rank = list(results.split(self.counts, dim=1))
        by_rank[self.sp_group.rank].copy_(own.detach())
        self.sp_group.all_reduce(results)  # every rank filled only its own part of the zeros
        by_rank[self.sp_group.rank] = own
        return tuple(column[self.order] for column in torch.cat(by_rank, dim=1))
