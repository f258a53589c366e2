"""Sequence parallelism: several ranks compute one packed row of tokens, each a slice of it.

The method is DeepSpeed's Ulysses (Jacobs et al. 2023). Norms, linear layers and the head work
token by token, so each rank computes them for its slice alone. Attention works head by head:
before it, an all-to-all gives each rank the whole row for its share of the heads; after it,
another all-to-all restores the slices. Parameters are sharded over all ranks, independently of
the sequence-parallel groups: a rank's gradient is the contribution of its slice, and FSDP sums
the contributions of all ranks.

`divide` installs it in a model; importing this module lets the attention of divided rows exchange.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from verl.batch import TokenBatch
from verl.config import Config
from verl.errors import ConfigError, explain
from verl.model_files import read_config
from verl.training.attention import PACKED, SequenceBounds, packed_attention
from verl.training.devices import to_device
from verl.training.family import layers_with_state
from verl.training.fsdp import FsdpModel
from verl.training.loading import model_folder
from verl.training.models import PackedInputs
from verl.training.roles import has_critic

CPU = torch.device("cpu")
OPTION = "ulysses_sequence_parallel_size"


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


@functools.cache
def joined(size: int, world: Any) -> SequenceParallelGroup:
    """Return this rank's group in the process group `world`; groups are created only once."""
    return SequenceParallelGroup.join(size)


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


@dataclass(frozen=True)
class SlicedBounds(SequenceBounds):
    """Bounds of a row of which each rank of a group computes a slice."""

    group: SequenceParallelGroup

    @property
    def position_ids(self) -> Tensor:
        """(1, slice_size) positions of this rank's slice."""
        return self.group.local_slice(super().position_ids)


@dataclass(frozen=True)
class SlicedInputs(PackedInputs):
    """Inputs of this rank: a slice of the row, and the targets that follow the slice's tokens."""

    gather: TargetGather

    @classmethod
    def divide(cls, row: PackedInputs, group: SequenceParallelGroup, device: torch.device) -> Self:
        """Return this rank's part of a row on the host."""
        cu_seqlens, cu_keys = (
            to_device(x, device) for x in (row.bounds.cu_seqlens, row.bounds.cu_keys)
        )
        bounds = SlicedBounds(row.bounds.spans, cu_seqlens, cu_keys, group)
        size = group.slice_size(row.input_ids.shape[1])
        gather, own = TargetGather.of(group, row.before_targets // size, device)
        input_ids, targets, before = (to_device(x, device) for x in (
            group.local_slice(row.input_ids), row.targets[own],
            row.before_targets[own] - size * group.rank,
        ))  # fmt: skip
        return cls(input_ids, bounds, row.target_positions, targets, before, gather)


def gathered(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a forward of `SlicedInputs` return the results of all ranks' targets."""

    def run(inputs: SlicedInputs, *arguments: Any) -> Any:
        results = forward(inputs, *arguments)
        if isinstance(results, Tensor):
            return inputs.gather.gather(results)[0]
        return inputs.gather.gather(*results)

    return run


def divide(model: FsdpModel) -> None:
    """Let groups of `ranks_per_shard` ranks compute the rows of `model` together."""
    lm = next(m for m in model.module.modules() if isinstance(m, PreTrainedModel))
    check_divisible(lm.config, model.options.ranks_per_shard, OPTION)
    group = joined(model.options.ranks_per_shard, dist.group.WORLD)

    def pack(batch: TokenBatch, mask: Tensor) -> SlicedInputs:
        return SlicedInputs.divide(PackedInputs.of(batch, mask, CPU), group, model.device)

    vars(model).update(pack=pack, forward=gathered(model.forward))


def attend_in_group(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, bounds: SequenceBounds | None = None,
    s_aux: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute `packed_attention`; for a divided row, of this rank's heads between two exchanges."""
    tensors, group = (query, key, value), None
    if isinstance(bounds, SlicedBounds):
        group = bounds.group
        slices = [x[0].transpose(0, 1) for x in tensors]
        row = group.slice_to_heads(slices, sum(bounds.lengths))
        query, key, value = (x.transpose(0, 1)[None] for x in row)
        s_aux = None if s_aux is None else s_aux.chunk(group.size)[group.rank]
    attended, _ = packed_attention(
        module, query, key, value, attention_mask, scaling, bounds, s_aux=s_aux, **others
    )
    if group is not None:
        attended = group.heads_to_slice(attended[0]).contiguous()[None]
    return attended, None


AttentionInterface.register(PACKED, attend_in_group)


def check_divisible(model: PretrainedConfig, size: int, key: str) -> None:
    """Raise ConfigError, for the option `key`, unless `size` ranks can share the model's rows.

    Heads must divide evenly over the ranks, and no layer may carry a state along the row.
    """
    text = model.get_text_config()
    states, heads = layers_with_state(model), text.num_attention_heads
    if states:
        expected = f"1 for {text.model_type}, whose {states} carry a state along the row"
        raise ConfigError(explain(key, size, expected, f"{key}=1"))
    if heads % size:
        largest = max(n for n in range(1, size) if heads % n == 0)
        expected = f"a divisor of the model's {heads} attention heads, which the ranks share"
        raise ConfigError(explain(key, size, expected, f"{key}={largest}"))


def problems(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each model, of those that are here, that ranks cannot share."""
    plan = config.placement
    models = {"actor_rollout_ref.actor": (config.actor_rollout_ref.model.path, plan.actor)}
    if has_critic(config):
        models["critic"] = (config.critic_path, plan.critic)
    for section, (path, ranks) in models.items():
        size, folder = ranks.ranks_per_shard, model_folder(path)
        if size > 1 and folder is not None:  # the ranks check a model that they download
            try:
                check_divisible(read_config(str(folder)), size, f"{section}.{OPTION}")
            except ConfigError as error:
                yield error


class LoneRank(SequenceParallelGroup):
    """A rank without its group; exchanges keep the shapes, not the values."""

    def all_to_all(self, x: Tensor) -> Tensor:
        return x.clone()

    def all_reduce(self, x: Tensor) -> None:
        pass


def as_lone_rank(
    row: PackedInputs, forward: Callable[..., Any], size: int
) -> tuple[SlicedInputs, Callable[..., Any]]:
    """Return one rank's part of a row without data, and its forward.

    All tokens of its slice are targets.
    """
    group = LoneRank(size, 0)
    own = group.local_slice(row.input_ids)
    every = torch.arange(size * own.shape[1])
    bounds = SlicedBounds(row.bounds.spans, row.bounds.cu_seqlens, row.bounds.cu_keys, group)
    gather = TargetGather(group, [own.shape[1]] * size, every)
    part = SlicedInputs(own, bounds, every, own[0], every[: own.shape[1]], gather)
    return part, gathered(forward)
