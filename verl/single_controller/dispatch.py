"""How a batch is divided over ranks and how the ranks' answers are joined: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.packing import Packing
from verl.types import TokenBatch


@dataclass(frozen=True)
class Split:
    """A batch divided over crews: crew c computes the sequences `parts[c]`, in `shards[c]`."""

    parts: list[list[int]]
    shards: list[TokenBatch]


def split_by_work(batch: TokenBatch, num_crews: int, pair_cost: float = 0.0) -> Split:
    """Divide sequences over crews so that each has nearly as much to compute: a token costs 1, each
    pair of tokens of a sequence `pair_cost`. A crew is as a rule one rank.

    One may be left without sequences when there are fewer of them than crews; it still takes part
    in every collective call with an empty shard.
    """
    parts = Packing.of(batch).over_ranks(num_crews, pair_cost)
    return Split(parts, [batch.select(part) for part in parts])


def together(groups: Sequence[str], num_parts: int) -> list[list[int]]:
    """Indices of each of `groups`, which one engine is to get so that the common prefix is cached
    once; where groups are fewer than parts each index by itself, so that no part is idle."""
    members: dict[str | int, list[int]] = {}
    is_divided = len(set(groups)) < num_parts
    for index, group in enumerate(groups):
        members.setdefault(index if is_divided else group, []).append(index)
    return list(members.values())


def split_groups(groups: Sequence[str], num_parts: int) -> list[list[int]]:
    """Indices of `groups` in parts, those of a group `together`.

    Each goes where the fewest indices are, so that parts differ by at most the largest group.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for indices in together(groups, num_parts):
        min(parts, key=len).extend(indices)
    return parts


def join_tokens(outputs: Sequence[Tensor], split: Split, batch: TokenBatch) -> Tensor:
    """Per-token outputs of all crews, put back into the batch's own order: (num_tokens,)."""
    order = [index for part in split.parts for index in part]
    flat = torch.cat(list(outputs))
    joined = torch.empty_like(flat)
    joined[batch.positions(order)] = flat
    return joined
