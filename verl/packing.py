"""Which sequences are computed together: over ranks, in micro-batches, behind one prompt.

The samples of a group begin with the same prompt. Where a batch has the row `SHARED_PROMPT`, those
that meet in a micro-batch are a family: the prompt's tokens are computed once, and each response
behind them (`verl.training.models.PackedInputs`). What is counted here are computed tokens; ranks
are balanced by their work, in which attention grows with the square of a sequence.
Without that row every sequence is a family by itself, and nothing else differs.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.types import TokenBatch

SHARED_PROMPT = "shared_prompt"
"""Row (num_seqs,) of a batch: tokens at a sequence's beginning that its whole group has too."""
LEAST_SHARE = 0.05
"""Share of a batch's tokens below which sparing them is not worth the copies of keys and values."""
KEYS_PER_TOKEN = 4
"""Keys and values of a micro-batch by its token budget: a prompt's are copied for each response,
which takes memory that the budget stands for."""


@dataclass(frozen=True)
class Family:
    """Sequences with one copy of the tokens that they begin with."""

    members: tuple[int, ...]
    """Which sequences of the batch."""
    lengths: tuple[int, ...]
    """Tokens of each."""
    shared: int = 0
    """Tokens that are computed once for all; 0 of a single member."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return sum(self.lengths) - self.shared * (len(self.lengths) - 1)

    def work(self, pair_cost: float) -> float:
        """What it takes to compute, where a token costs 1 and attention `pair_cost` for the square
        of a sequence's; that of a shared prompt is computed once."""
        pairs = sum(n * n for n in self.lengths) - self.shared**2 * (len(self.lengths) - 1)
        return self.num_tokens + pair_cost * pairs

    @property
    def cost(self) -> int:
        """Tokens of a budget that the family takes."""
        num_keys = self.shared + sum(self.lengths)
        return max(self.num_tokens, -(-num_keys // KEYS_PER_TOKEN))

    def cut(self, size: int) -> list[Family]:
        """Families of `size` members at most, each with a copy of its own."""
        starts = range(0, len(self.members), size)
        parts = [(self.members[s : s + size], self.lengths[s : s + size]) for s in starts]
        return [Family(m, n, self.shared if len(m) > 1 else 0) for m, n in parts]

    def within(self, budget: int) -> list[Family]:
        """Families that take `budget` tokens at most, but for single sequences that are longer."""
        if len(self.members) == 1 or self.cost <= budget:
            return [self]
        return [
            part for half in self.cut(-(-len(self.members) // 2)) for part in half.within(budget)
        ]


@dataclass(frozen=True)
class Packing:
    """What must be known of a batch to divide it."""

    lengths: Sequence[int]
    shared: Sequence[int]
    """Tokens that each sequence has in common with its group."""
    groups: Sequence[str]
    """Read where something is shared."""

    @classmethod
    def of(cls, batch: TokenBatch) -> Packing:
        """The packing of a batch, with its prompts shared where it has the row `SHARED_PROMPT`."""
        lengths = batch.lengths.tolist()
        if SHARED_PROMPT not in batch.rows:
            return cls(lengths, [0] * len(lengths), [])
        return cls(lengths, batch.rows[SHARED_PROMPT].tolist(), batch.columns["group"])

    def families(self, indices: Sequence[int]) -> list[Family]:
        """Who of the sequences at `indices` share a prompt, in order of first members."""
        members: dict[str | int, list[int]] = {}
        for i in indices:
            members.setdefault(self.groups[i] if self.shared[i] else i, []).append(i)
        return [
            Family(tuple(m), tuple(self.lengths[i] for i in m), self.shared[m[0]] * (len(m) > 1))
            for m in members.values()
        ]

    def num_tokens(self, indices: Sequence[int]) -> int:
        """Tokens that are computed if these sequences are together."""
        return sum(family.num_tokens for family in self.families(indices))

    def work(self, indices: Sequence[int], pair_cost: float) -> float:
        """What these sequences take together, as `Family.work` counts."""
        return sum(family.work(pair_cost) for family in self.families(indices))

    def split_over_ranks(self, num_ranks: int, pair_cost: float = 0.0) -> list[list[int]]:
        """Sequences of each rank: the division whose slowest rank has the least work.

        Whole groups repeat no prompt, but their parts can be divided more evenly; a rank may get
        nothing.
        """
        whole = self.families(range(len(self.lengths)))
        size = max((len(family.members) for family in whole), default=1)
        divisions = []
        while size:
            units = [part for family in whole for part in family.cut(size)]
            parts = [
                sorted(i for u in part for i in units[u].members)
                for part in balance([u.work(pair_cost) for u in units], num_ranks)
            ]
            divisions.append(parts)
            size //= 2
        return min(divisions, key=lambda parts: max(self.work(p, pair_cost) for p in parts))

    def micro_batches(
        self, indices: Sequence[int], budget: int, at_least: int = 1
    ) -> list[list[int]]:
        """Micro-batches of at most `budget` tokens; a group is only divided where it is too large.

        `at_least` asks for that many (trailing ones may be empty), so that every rank runs the same
        number.
        """
        units = [part for family in self.families(indices) for part in family.within(budget)]
        bins = pack([unit.cost for unit in units], budget, at_least)
        return [sorted(i for u in one for i in units[u].members) for one in bins]

    def saved_prompts(self, num_ranks: int, budget: int, pair_cost: float = 0.0) -> list[int]:
        """Lengths of the prompts that ranks with this budget need not compute, copy by copy."""
        if not any(self.shared):
            return []
        return [
            family.shared
            for rank in self.split_over_ranks(num_ranks, pair_cost)
            for micro in self.micro_batches(rank, budget)
            for family in self.families(micro)
            for _ in family.members[1:]
        ]


def share_prompts(batch: TokenBatch) -> None:
    """Have the prompts of groups computed once, where it is worth it.

    Adds the row `SHARED_PROMPT` if at least `LEAST_SHARE` of the batch's tokens are spared by it.
    """
    batch.rows[SHARED_PROMPT] = common_prompts(batch)
    if saved_token_share(batch) < LEAST_SHARE:
        del batch.rows[SHARED_PROMPT]


def saved_token_share(batch: TokenBatch) -> float:
    """The share of the batch's tokens that need not be computed while groups stay whole."""
    computed = Packing.of(batch).num_tokens(range(len(batch)))
    return 1.0 - computed / batch.num_tokens if batch.num_tokens else 0.0


def common_prompts(batch: TokenBatch) -> Tensor:
    """(num_seqs,) prompt tokens that each sequence has in common with all of its group.

    They are compared as ids, whatever a group is; each sequence keeps a token of its own.
    """
    ids, starts = batch.tokens["input_ids"].numpy(), batch.offsets.tolist()
    lengths = prompt_lengths(batch)
    groups: dict[str, list[int]] = {}
    for i, group in enumerate(batch.columns["group"]):
        groups.setdefault(group, []).append(i)
    found = torch.zeros(len(batch), dtype=torch.int64)
    for members in groups.values():
        common = min(lengths[i] for i in members)
        first = ids[starts[members[0]] :]
        for i in members[1:]:
            differs = np.flatnonzero(first[:common] != ids[starts[i] : starts[i] + common])
            common = int(differs[0]) if len(differs) else common
        found[members] = common
    return found


def prompt_lengths(batch: TokenBatch) -> list[int]:
    """Tokens of each sequence before its first response token, and all but one without any."""
    found = []
    for mask in np.split(batch.tokens["response_mask"].numpy(), batch.offsets[1:-1].numpy()):
        has_any = bool(mask.any())
        found.append(int(mask.argmax()) if has_any else max(len(mask) - 1, 0))
    return found


@dataclass(frozen=True)
class Split:
    """A batch divided over sequence-parallel groups: group g computes sequences `parts[g]`, whose
    batch is `shards[g]`."""

    parts: list[list[int]]
    shards: list[TokenBatch]


def split_by_work(batch: TokenBatch, num_sp_groups: int, pair_cost: float = 0.0) -> Split:
    """Divide sequences over sequence-parallel groups (by default one rank each) so that all have
    nearly the same work: a token costs 1, each pair of tokens of a sequence `pair_cost`.

    With fewer sequences than groups, some groups get an empty shard; their ranks still take part
    in every collective call.
    """
    parts = Packing.of(batch).split_over_ranks(num_sp_groups, pair_cost)
    return Split(parts, [batch.select(part) for part in parts])


def scheduling_units(groups: Sequence[str], num_parts: int) -> list[list[int]]:
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
    for indices in scheduling_units(groups, num_parts):
        min(parts, key=len).extend(indices)
    return parts


def join_tokens(outputs: Sequence[Tensor], split: Split, batch: TokenBatch) -> Tensor:
    """Concatenate the groups' per-token outputs in the order of the batch: (num_tokens,)."""
    order = [index for part in split.parts for index in part]
    flat = torch.cat(list(outputs))
    joined = torch.empty_like(flat)
    joined[batch.positions(order)] = flat
    return joined


def balance(lengths: Sequence[float], num_parts: int) -> list[list[int]]:
    """Split sequence indices into `num_parts` parts of nearly equal sums of `lengths`.

    Longest first into the lightest part. Parts are in ascending index order; a part may be empty
    when there are fewer sequences than parts.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0.0, part) for part in range(num_parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, part = heapq.heappop(heap)
        parts[part].append(index)
        heapq.heappush(heap, (load + lengths[index], part))
    return [sorted(part) for part in parts]


def pack(lengths: Sequence[int], budget: int, at_least: int = 1) -> list[list[int]]:
    """Group sequence indices into micro-batches of at most `budget` tokens each.

    A sequence longer than the budget gets a micro-batch of its own. `at_least` asks for that many
    micro-batches (trailing ones may be empty), so that every rank runs the same number.
    """
    bins: list[list[int]] = []
    room = np.empty(len(lengths), dtype=np.int64)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = room[: len(bins)] >= lengths[index]
        first = int(fits.argmax()) if fits.any() else len(bins)
        if first == len(bins):
            bins.append([])
            room[first] = budget
        bins[first].append(index)
        room[first] -= lengths[index]
    bins += [[] for _ in range(at_least - len(bins))]
    return [sorted(b) for b in bins]
