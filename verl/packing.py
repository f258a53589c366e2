"""Division of sequences over ranks and into micro-batches, with common beginnings computed once.

The samples of a group begin with the same prompt, and some go on with the same turn and documents.
Where a batch has the column `PREFIXES`, those that are in the same micro-batch form a prefix group:
what several of them have in common is computed once, and what is their own follows it
(`verl.training.models.PackedInputs`). Token counts here are of computed tokens. Ranks are balanced
by their work, in which attention grows with the square of a sequence's length. Without that column,
every sequence is a prefix group by itself.
"""

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from verl.batch import ROW_STARTS, TokenBatch

Prefix = tuple[int, int]
"""A beginning that several sequences have in common: its number in the batch, and its length."""
PREFIXES = "prefixes"
"""Column of a batch: the prefixes of each sequence, shortest first; each begins with the last."""
MIN_COMMON = 16
"""Tokens that sequences must have in common after a shared prompt, to be worth a copy of keys."""
MIN_SAVED_SHARE = 0.05
"""Share of a batch's tokens that sharing must save, to be worth the copies of keys and values."""
PAIR_COST = 2.5e-5
"""Work of a pair of tokens in attention, in units of all other work of a token: that of a model of
3 billion parameters, which balances other sizes as well (docs/evidence/updates.md)."""
KEYS_PER_TOKEN = 4
"""Keys and values that a micro-batch may hold per token of its budget, copies included."""


class Run(NamedTuple):
    """Tokens that are computed once: positions `start` to `end` of each of the `members`."""

    start: int
    end: int
    members: tuple[int, ...]
    """Indices of the sequences in the batch."""


@dataclass(frozen=True)
class PrefixGroup:
    """Sequences with common prefixes."""

    members: tuple[int, ...]
    """Indices of the sequences in the batch."""
    packing: "Packing"
    """The batch."""

    @functools.cached_property
    def runs(self) -> tuple[Run, ...]:
        """The runs that are computed, each after the one that its sequences begin with."""
        return tuple(self._runs(self.members, 0, 0))

    def _runs(self, chosen: Sequence[int], start: int, depth: int) -> Iterator[Run]:
        """Yield the runs of the `chosen` from `start`, where `depth` prefixes of theirs end."""
        prefixes, branches = self.packing.prefixes, dict[int, list[int]]()
        for i in chosen:
            number = prefixes[i][depth][0] if len(prefixes[i]) > depth else -1 - i
            branches.setdefault(number, []).append(i)
        for branch in branches.values():
            if len(branch) == 1:
                if (end := self.packing.lengths[branch[0]]) > start:
                    yield Run(start, end, tuple(branch))
                continue
            # What all of them go on with is a single run.
            paths = zip(*(prefixes[i][depth:] for i in branch), strict=False)
            ends = [path[0][1] for path in paths if len(set(path)) == 1]
            yield Run(start, ends[-1], tuple(branch))
            yield from self._runs(branch, ends[-1], depth + len(ends))

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return sum(run.end - run.start for run in self.runs)

    @property
    def work(self) -> float:
        """The work: 1 per computed token, `PAIR_COST` per pair of tokens in attention."""
        return self.num_tokens + PAIR_COST * sum(run.end**2 - run.start**2 for run in self.runs)

    @property
    def cost(self) -> int:
        """Tokens of a micro-batch's budget that the group takes."""
        num_keys = sum(run.end for run in self.runs)
        return max(self.num_tokens, -(-num_keys // KEYS_PER_TOKEN))

    def split(self, size: int) -> "list[PrefixGroup]":
        """Split into groups of at most `size` members, neighbours those with most in common."""
        order = sorted(self.members, key=lambda i: self.packing.prefixes[i])
        parts = [order[start : start + size] for start in range(0, len(order), size)]
        return [PrefixGroup(tuple(part), self.packing) for part in parts]

    def split_to_budget(self, budget: int) -> "list[PrefixGroup]":
        """Split into groups that cost at most `budget`, except for longer single sequences."""
        if len(self.members) == 1 or self.cost <= budget:
            return [self]
        halves = self.split(-(-len(self.members) // 2))
        return [group for half in halves for group in half.split_to_budget(budget)]


@dataclass(frozen=True)
class Packing:
    """The properties of a batch that its division depends on."""

    lengths: Sequence[int]
    """Tokens of each sequence."""
    prefixes: Sequence[tuple[Prefix, ...]]
    """Prefixes of each sequence."""

    @classmethod
    def of(cls, batch: TokenBatch) -> Self:
        """Build the packing of a batch; prefixes are shared if it has the column `PREFIXES`."""
        return cls(batch.lengths.tolist(), batch.columns.get(PREFIXES, [()] * len(batch)))

    def prefix_groups(self, indices: Sequence[int]) -> list[PrefixGroup]:
        """Group the sequences `indices` by their first prefix, in order of first members."""
        members: dict[int, list[int]] = {}
        for i in indices:
            first = self.prefixes[i][0][0] if self.prefixes[i] else -1 - i
            members.setdefault(first, []).append(i)
        return [PrefixGroup(tuple(group), self) for group in members.values()]

    def num_tokens(self, indices: Sequence[int]) -> int:
        """Count the tokens that are computed if these sequences are in one micro-batch."""
        return sum(group.num_tokens for group in self.prefix_groups(indices))

    def work(self, indices: Sequence[int]) -> float:
        """Sum up the work of these sequences, as defined by `PrefixGroup.work`."""
        return sum(group.work for group in self.prefix_groups(indices))

    def split_over_ranks(self, num_ranks: int) -> list[list[int]]:
        """Divide sequences so that the slowest rank has the least work; a rank may get none."""
        whole = self.prefix_groups(range(len(self.lengths)))
        size = max((len(group.members) for group in whole), default=1)
        divisions = []
        # Whole groups compute each prompt once, but halves, quarters … can be balanced better.
        while size:
            units = [part for group in whole for part in group.split(size)]
            parts = balance([unit.work for unit in units], num_ranks)
            divisions.append([_members(units, part) for part in parts])
            size //= 2
        return min(divisions, key=lambda parts: max(self.work(part) for part in parts))

    def micro_batches(
        self, indices: Sequence[int], budget: int, min_count: int = 1
    ) -> list[list[int]]:
        """Divide sequences into micro-batches as `pack` does; only groups over budget are split."""
        units = [part for g in self.prefix_groups(indices) for part in g.split_to_budget(budget)]
        return [_members(units, b) for b in pack([u.cost for u in units], budget, min_count)]


def _members(groups: Sequence[PrefixGroup], chosen: Sequence[int]) -> list[int]:
    """Return the members of the chosen groups, in ascending order."""
    return sorted(i for number in chosen for i in groups[number].members)


def share_prompts(batch: TokenBatch) -> None:
    """Add the column `PREFIXES` if it saves at least `MIN_SAVED_SHARE` of the batch's tokens."""
    batch.columns[PREFIXES] = common_prefixes(batch)
    if saved_token_share(batch) < MIN_SAVED_SHARE:
        del batch.columns[PREFIXES]


def saved_token_share(batch: TokenBatch) -> float:
    """Return the share of the batch's tokens that is not computed if all groups stay whole."""
    return 1.0 - computed_token_share([batch])


def computed_token_share(micro_batches: Sequence[TokenBatch]) -> float:
    """Return the share of their tokens that is computed, what is alike within each only once."""
    computed = sum(Packing.of(micro).num_tokens(range(len(micro))) for micro in micro_batches)
    total = sum(micro.num_tokens for micro in micro_batches)
    return computed / total if total else 1.0


def as_rows(batch: TokenBatch) -> TokenBatch:
    """Return the rows of all sequences as sequences of their own; no token moves.

    Of the columns, only `input_ids` and `PREFIXES` are kept: first rows have their sequence's.
    """
    if ROW_STARTS not in batch.tokens:
        return batch
    further = batch.tokens[ROW_STARTS].nonzero()[:, 0]
    offsets = torch.cat([batch.offsets, further]).sort().values
    columns = {}
    if PREFIXES in batch.columns:
        counts = [int(starts.sum()) for starts in batch.sequences(ROW_STARTS)]
        pairs = zip(batch.columns[PREFIXES], counts, strict=True)
        columns[PREFIXES] = [row for own, n in pairs for row in (own, *[()] * n)]
    return TokenBatch(offsets, {"input_ids": batch.tokens["input_ids"]}, columns=columns)


def common_prefixes(batch: TokenBatch) -> list[tuple[Prefix, ...]]:
    """Find what the sequences of each group have in common: the prefixes of each sequence.

    Tokens are compared, since prompts of a group may differ. A prefix may hold sampled tokens,
    whose losses each sequence keeps. Each sequence keeps a token of its own.
    """
    ids, ends = batch.tokens["input_ids"].numpy(), batch.offsets[1:-1].numpy()
    sequences, prompts = np.split(ids, ends), prompt_lengths(batch)
    if ROW_STARTS in batch.tokens:  # only first rows have anything in common
        starts = np.split(batch.tokens[ROW_STARTS].numpy(), ends)
        firsts = zip(sequences, starts, strict=True)
        sequences = [ids[: int(start.argmax()) or None] for ids, start in firsts]
    prefixes: list[tuple[Prefix, ...]] = [()] * len(batch)
    numbers = itertools.count()

    def add(members: Sequence[int], start: int, longest: int) -> None:
        """Add what these have in common after `start`, and then what some of them have."""
        parts = np.stack([sequences[i][start:longest] for i in members])
        differs = np.flatnonzero((parts[1:] != parts[0]).any(axis=0))
        end = int(differs[0]) + start if len(differs) else max(start, longest)
        if end > start:
            prefix = next(numbers), end
            for i in members:
                prefixes[i] = (*prefixes[i], prefix)
        branches: dict[bytes, list[int]] = {}
        for i in members:
            if len(sequences[i]) > end + MIN_COMMON:
                following = sequences[i][end : end + MIN_COMMON].tobytes()
                branches.setdefault(following, []).append(i)
        for branch in branches.values():
            if len(branch) > 1:
                add(branch, end, min(len(sequences[i]) for i in branch) - 1)

    for members in group_members(batch.columns["group"]):
        if len(members) > 1:
            add(members, 0, min(prompts[i] for i in members))
    return prefixes


def prompt_lengths(batch: TokenBatch) -> list[int]:
    """Count each sequence's tokens before its first policy token; without one, all but one."""
    masks = np.split(batch.tokens["policy_mask"].numpy(), batch.offsets[1:-1].numpy())
    return [int(mask.argmax()) if mask.any() else max(len(mask) - 1, 0) for mask in masks]


@dataclass(frozen=True)
class Split:
    """A batch divided into shards."""

    parts: list[list[int]]
    """Indices of each shard's sequences."""
    shards: list[TokenBatch]
    """Sequences of each shard."""


def split_by_work(batch: TokenBatch, num_shards: int) -> Split:
    """Divide sequences into shards of nearly equal work; some may be empty."""
    parts = Packing.of(batch).split_over_ranks(num_shards)
    return Split(parts, [batch.select(part) for part in parts])


def group_members(groups: Sequence[str]) -> list[list[int]]:
    """Return the indices of each group, groups in the order of their first members."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return list(members.values())


def scheduling_units(groups: Sequence[str], num_parts: int) -> list[list[int]]:
    """Return the indices of each group, or single indices if there are fewer groups than parts."""
    # An engine caches the prefix of a whole group once; single indices leave no part idle.
    whole = group_members(groups)
    return [[index] for index in range(len(groups))] if len(whole) < num_parts else whole


def split_groups(groups: Sequence[str], num_parts: int) -> list[list[int]]:
    """Divide indices into parts of whole `scheduling_units`, each added to the smallest part."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for indices in scheduling_units(groups, num_parts):
        min(parts, key=len).extend(indices)
    return parts


def join_tokens(outputs: Sequence[Tensor], split: Split, batch: TokenBatch) -> Tensor:
    """Concatenate the shards' per-token outputs in the order of the batch: (num_tokens,)."""
    order = [index for part in split.parts for index in part]
    flat = torch.cat(list(outputs))
    joined = torch.empty_like(flat)
    joined[batch.positions(order)] = flat
    return joined


def balance(lengths: Sequence[float], num_parts: int) -> list[list[int]]:
    """Divide indices into parts of nearly equal total length: longest first, to the lightest."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0.0, part) for part in range(num_parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, part = heapq.heappop(heap)
        parts[part].append(index)
        heapq.heappush(heap, (load + lengths[index], part))
    return [sorted(part) for part in parts]


def pack(lengths: Sequence[int], budget: int, min_count: int = 1) -> list[list[int]]:
    """Group sequence indices into micro-batches of at most `budget` tokens, first-fit decreasing.

    A longer sequence gets a micro-batch of its own. At least `min_count` micro-batches are
    returned, the last ones perhaps empty, so that every rank can run the same number.
    """
    bins: list[list[int]] = []
    free = np.empty(len(lengths), dtype=np.int64)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = free[: len(bins)] >= lengths[index]
        first = int(fits.argmax()) if fits.any() else len(bins)
        if first == len(bins):
            bins.append([])
            free[first] = budget
        bins[first].append(index)
        free[first] -= lengths[index]
    bins += [[] for _ in range(min_count - len(bins))]
    return [sorted(b) for b in bins]
