"""Division of sequences over ranks and into micro-batches, with shared prompts computed once.

The samples of a group begin with the same prompt. Where a batch has the row `SHARED_PROMPT`, those
that are in the same micro-batch form a prefix group: the prompt is computed once, and the responses
follow it (`verl.training.models.PackedInputs`). Token counts here are of computed tokens. Ranks
are balanced by their work, in which attention grows with the square of a sequence's length.
Without that row, every sequence is a prefix group by itself.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from verl.batch import TokenBatch

SHARED_PROMPT = "shared_prompt"
"""Row (num_seqs,) of a batch: leading tokens that each sequence has in common with its group."""
MIN_SAVED_SHARE = 0.05
"""Share of a batch's tokens that sharing must save, to be worth the copies of keys and values."""
PAIR_COST = 2.5e-5
"""Work of a pair of tokens in attention, in units of all other work of a token: that of a model of
3 billion parameters, which balances other sizes as well (docs/evidence/updates.md)."""
KEYS_PER_TOKEN = 4
"""Keys and values that a micro-batch may hold per token of its budget, prompt copies included."""


@dataclass(frozen=True)
class PrefixGroup:
    """Sequences whose common prefix is computed once."""

    members: tuple[int, ...]
    """Indices of the sequences in the batch."""
    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    shared: int = 0
    """Tokens of the common prefix; 0 for a single sequence."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return sum(self.lengths) - self.shared * (len(self.lengths) - 1)

    @property
    def work(self) -> float:
        """The work: 1 per computed token, `PAIR_COST` per pair of tokens in attention."""
        pairs = sum(n * n for n in self.lengths) - self.shared**2 * (len(self.lengths) - 1)
        return self.num_tokens + PAIR_COST * pairs

    @property
    def cost(self) -> int:
        """Tokens of a micro-batch's budget that the group takes."""
        num_keys = self.shared + sum(self.lengths)
        return max(self.num_tokens, -(-num_keys // KEYS_PER_TOKEN))

    def split(self, size: int) -> "list[PrefixGroup]":
        """Split into groups of at most `size` members, each of which computes the prefix."""
        groups = []
        for start in range(0, len(self.members), size):
            members = self.members[start : start + size]
            shared = self.shared if len(members) > 1 else 0
            groups.append(PrefixGroup(members, self.lengths[start : start + size], shared))
        return groups

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
    shared: Sequence[int]
    """Leading tokens that each sequence has in common with its group."""
    groups: Sequence[str]
    """Group of each sequence; may be empty if nothing is shared."""

    @classmethod
    def of(cls, batch: TokenBatch) -> Self:
        """Build the packing of a batch; prompts are shared if it has the row `SHARED_PROMPT`."""
        lengths, shared, groups = batch.lengths.tolist(), [0] * len(batch), list[str]()
        if SHARED_PROMPT in batch.rows:
            shared, groups = batch.rows[SHARED_PROMPT].tolist(), batch.columns["group"]
        return cls(lengths, shared, groups)

    def prefix_groups(self, indices: Sequence[int]) -> list[PrefixGroup]:
        """Group the sequences `indices` by their shared prompt, in order of first members."""
        members: dict[str | int, list[int]] = {}
        for i in indices:
            members.setdefault(self.groups[i] if self.shared[i] else i, []).append(i)
        groups = []
        for group in members.values():
            shared = self.shared[group[0]] if len(group) > 1 else 0
            lengths = tuple(self.lengths[i] for i in group)
            groups.append(PrefixGroup(tuple(group), lengths, shared))
        return groups

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
    """Add the row `SHARED_PROMPT` if it saves at least `MIN_SAVED_SHARE` of the batch's tokens."""
    batch.rows[SHARED_PROMPT] = common_prompts(batch)
    if saved_token_share(batch) < MIN_SAVED_SHARE:
        del batch.rows[SHARED_PROMPT]


def saved_token_share(batch: TokenBatch) -> float:
    """Return the share of the batch's tokens that is not computed if all groups stay whole."""
    computed = Packing.of(batch).num_tokens(range(len(batch)))
    return 1.0 - computed / batch.num_tokens if batch.num_tokens else 0.0


def common_prompts(batch: TokenBatch) -> Tensor:
    """Count the prompt tokens that each sequence has in common with its whole group, (num_seqs,).

    Prompts are compared, since a group's may differ. Each sequence keeps a token of its own.
    """
    ids, starts = batch.tokens["input_ids"].numpy(), batch.offsets.tolist()
    lengths = prompt_lengths(batch)
    groups: dict[str, list[int]] = {}
    for i, group in enumerate(batch.columns["group"]):
        groups.setdefault(group, []).append(i)
    result = torch.zeros(len(batch), dtype=torch.int64)
    for members in groups.values():
        common = min(lengths[i] for i in members)
        first = ids[starts[members[0]] :]
        for i in members[1:]:
            differs = np.flatnonzero(first[:common] != ids[starts[i] : starts[i] + common])
            common = int(differs[0]) if len(differs) else common
        result[members] = common
    return result


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


def scheduling_units(groups: Sequence[str], num_parts: int) -> list[list[int]]:
    """Return the indices of each group, or single indices if there are fewer groups than parts."""
    # An engine caches the prefix of a whole group once; single indices leave no part idle.
    members: dict[str | int, list[int]] = {}
    is_divided = len(set(groups)) < num_parts
    for index, group in enumerate(groups):
        members.setdefault(index if is_divided else group, []).append(index)
    return list(members.values())


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
