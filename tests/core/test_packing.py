"""Division of sequences over ranks and into micro-batches, with and without shared prompts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.batches import make_groups, make_tree
from verl.batch import TokenBatch
from verl.packing import (
    MIN_COMMON,
    PAIR_COST,
    PREFIXES,
    Packing,
    balance,
    common_prefixes,
    computed_token_share,
    join_tokens,
    pack,
    saved_token_share,
    share_prompts,
    split_by_work,
    split_groups,
)

groups_strategy = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5)), max_size=6
)
lengths_strategy = st.lists(st.integers(1, 30), min_size=1, max_size=12)
Groups = list[tuple[int, list[int]]]


def make_packing(groups: Groups) -> Packing:
    """Build the packing of groups given by the lengths of prompt and responses."""
    members = [(i, p, p + r) for i, (p, responses) in enumerate(groups) for r in responses]
    return Packing([n for _, _, n in members], [((i, p),) for i, p, _ in members])


def count_computed(packing: Packing, indices: list[int]) -> int:
    """Count each prefix once, from where the one before it ends, and what is a sequence's own."""
    counted, total = set[int](), 0
    for i in indices:
        start = 0
        for number, end in packing.prefixes[i]:
            total += (end - start) * (number not in counted)
            counted.add(number)
            start = end
        total += packing.lengths[i] - start
    return total


@given(groups_strategy, st.integers(1, 40), st.integers(1, 4))
def test_micro_batches_hold_each_sequence_once_within_the_budget(
    groups: Groups, budget: int, min_count: int
) -> None:
    """Computed tokens are counted, and only a single over-long sequence exceeds the budget."""
    packing = make_packing(groups)
    bins = packing.micro_batches(range(len(packing.lengths)), budget, min_count)
    assert sorted(i for b in bins for i in b) == list(range(len(packing.lengths)))
    assert len(bins) >= min_count
    for b in bins:
        assert packing.num_tokens(b) == count_computed(packing, b)
        assert packing.num_tokens(b) <= budget or len(b) == 1


@given(groups_strategy, st.integers(1, 5))
def test_ranks_get_each_sequence_once_and_no_more_work_than_without_sharing(
    groups: Groups, num_ranks: int
) -> None:
    """The slowest rank computes no more than if sequences were divided by length."""
    packing = make_packing(groups)
    parts = packing.split_over_ranks(num_ranks)
    assert len(parts) == num_ranks
    assert sorted(i for part in parts for i in part) == list(range(len(packing.lengths)))
    alone = balance(packing.lengths, num_ranks)
    slowest = max(packing.num_tokens(part) for part in parts)
    assert slowest <= max(sum(packing.lengths[i] for i in part) for part in alone)


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(1, 4), st.integers(1, 30))
def test_without_shared_prompts_sequences_are_balanced_and_packed(
    lengths: list[int], num_ranks: int, budget: int
) -> None:
    """Only by the rules of `balance` and `pack`."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    packing = Packing.of(TokenBatch(offsets))
    work = [n + PAIR_COST * n * n for n in lengths]
    assert packing.split_over_ranks(num_ranks) == balance(work, num_ranks)
    sequences = range(len(lengths))
    assert packing.micro_batches(sequences, budget, 2) == pack(lengths, budget, 2)


@given(groups_strategy, st.integers(1, 5))
def test_ranks_are_balanced_by_work(groups: Groups, num_ranks: int) -> None:
    """No rank exceeds the mean by more than the longest unit; attention's square is counted."""
    packing = make_packing(groups)
    parts = packing.split_over_ranks(num_ranks)
    assert sorted(i for part in parts for i in part) == list(range(len(packing.lengths)))
    alone = [packing.work([i]) for i in range(len(packing.lengths))]
    assert alone == pytest.approx([n + PAIR_COST * n * n for n in packing.lengths])
    slowest = max(packing.work(part) for part in parts)
    assert slowest <= sum(alone) / num_ranks + max(alone, default=0) + 1e-9


def test_a_long_sequence_counts_for_more_than_its_tokens() -> None:
    """By tokens, 32,000 needs 1,000 more; with attention's square, the short ones are less work."""
    packing = Packing([32_000, *[8_000] * 4, 1_000], [()] * 6)
    assert packing.split_over_ranks(2) == [[0], [1, 2, 3, 4, 5]]
    group = make_packing([(10, [5, 5])])  # the prompt's square counts once
    assert group.work([0, 1]) == 20 + PAIR_COST * (10**2 + 2 * (15**2 - 10**2))


def test_groups_stay_whole_where_they_fit() -> None:
    """Groups of 6 + 3 · 2 tokens: one in a micro-batch of 12, two in one of 24."""
    packing = make_packing([(6, [2, 2, 2])] * 3)
    sequences = range(9)
    assert packing.micro_batches(sequences, 12) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert packing.micro_batches(sequences, 24) == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    assert packing.split_over_ranks(3) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_group_is_split_if_it_is_too_large() -> None:
    """For the budget, or for one of two ranks: 10 tokens each are better than 16 and none."""
    packing = make_packing([(4, [3, 3, 3, 3])])
    assert packing.num_tokens(range(4)) == 16
    assert packing.micro_batches(range(4), 15) == [[0, 1], [2, 3]]
    assert packing.split_over_ranks(2) == [[0, 1], [2, 3]]


def test_copied_keys_take_a_part_of_the_budget() -> None:
    """One-token responses to a long prompt: 108 tokens are computed, with 908 keys."""
    packing = make_packing([(100, [1] * 8)])
    assert packing.num_tokens(range(8)) == 108
    assert packing.micro_batches(range(8), 227) == [list(range(8))]
    assert packing.micro_batches(range(8), 226) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def ends_of(batch: TokenBatch) -> list[list[int]]:
    """Return the lengths of each sequence's prefixes."""
    return [[end for _, end in prefixes] for prefixes in common_prefixes(batch)]


def test_prompts_are_compared_by_their_ids() -> None:
    """Only the prefix of the whole group is shared, and each member keeps a token of its own."""
    batch = make_groups([(5, [3, 4]), (6, [2, 2, 2]), (4, [5])])
    ids, starts = batch.tokens["input_ids"], batch.offsets.tolist()
    ids[starts[3] + 2] += 1  # in the second group's second prompt
    assert ends_of(batch) == [[5], [5], [2], [2], [2], []]
    batch.tokens["response_mask"][starts[0] : starts[1]] = False  # no response
    assert ends_of(batch)[:2] == [[5], [5]]
    batch.columns["group"] = ["same"] * 6
    assert ends_of(batch) == [[]] * 6


def test_what_some_of_a_group_sampled_alike_is_shared_too() -> None:
    """Prefixes are nested, each sequence keeps a token, and fewer than 16 do not count."""
    batch = make_tree()
    assert ends_of(batch) == [
        [5],
        [5, 25, 41],
        [5, 25, 41],
        [5, 25, 64],
        [5, 25, 64],
        [3, 42],
        [3, 42],
    ]
    share_prompts(batch)
    packing = Packing.of(batch)
    first, second = packing.prefix_groups(range(7))
    assert [(run.start, run.end, run.members) for run in first.runs] == [
        (0, 5, (0, 1, 2, 3, 4)), (5, 35, (0,)), (5, 25, (1, 2, 3, 4)), (25, 41, (1, 2)),
        (41, 42, (1,)), (41, 65, (2,)), (25, 64, (3, 4)), (64, 65, (3,)), (64, 65, (4,)),
    ]  # fmt: skip
    assert [(run.start, run.end) for run in second.runs] == [(0, 42), (42, 43), (42, 43)]
    assert packing.num_tokens(range(7)) == count_computed(packing, list(range(7)))
    ids, starts = batch.tokens["input_ids"].tolist(), batch.offsets.tolist()
    for run in first.runs:
        texts = {tuple(ids[starts[m] : starts[m] + run.end]) for m in run.members}
        assert len(texts) == 1
    kept = packing.prefix_groups([2, 4])  # what only those in common have is one run
    assert [(run.start, run.end) for run in kept[0].runs] == [(0, 25), (25, 65), (25, 65)]
    assert [half.members for half in first.split(3)] == [(0, 1, 2), (3, 4)]


@given(
    st.lists(
        st.tuples(
            st.integers(1, 3),
            st.lists(st.tuples(st.integers(0, 2), st.integers(17, 40)), max_size=3),
        ),
        min_size=2,
        max_size=7,
    ),
    st.integers(20, 200),
)
def test_trees_are_divided_like_groups(
    shapes: list[tuple[int, list[tuple[int, int]]]], budget: int
) -> None:
    """Computed tokens are those of a set of all beginnings; micro-batches keep to the budget."""
    texts = [
        [9] * 4 + [kind for kind, n in parts for _ in range(n)] + [5] * tail
        for tail, parts in shapes
    ]
    offsets = torch.tensor([0, *map(len, texts)]).cumsum(0)
    mask = torch.cat([torch.arange(len(text)) >= 4 for text in texts])
    batch = TokenBatch(
        offsets,
        {"input_ids": torch.tensor([i for t in texts for i in t]), "policy_mask": mask},
        columns={"group": ["g"] * len(texts)},
    )
    batch.columns[PREFIXES] = common_prefixes(batch)
    packing = Packing.of(batch)
    everything = list(range(len(texts)))
    beginnings = {tuple(text[: n + 1]) for text in texts for n in range(len(text))}
    computed = packing.num_tokens(everything)
    assert len(beginnings) <= computed == count_computed(packing, everything)
    assert computed <= len(beginnings) + len(texts) * (MIN_COMMON + 1)
    bins = packing.micro_batches(everything, budget)
    assert sorted(i for b in bins for i in b) == everything
    assert all(packing.num_tokens(b) <= budget or len(b) == 1 for b in bins)


@pytest.mark.parametrize(("prompt", "is_worth_it"), [(3, False), (4, True)])
def test_prompts_are_shared_if_that_saves_enough(prompt: int, is_worth_it: bool) -> None:
    """3 of 62 tokens are less than 5 %, 4 of 64 are more."""
    batch = make_groups([(prompt, [28, 28])])
    share_prompts(batch)
    assert (PREFIXES in batch.columns) is is_worth_it
    assert saved_token_share(batch) == pytest.approx(prompt / (2 * prompt + 56) * is_worth_it)


def test_a_divided_group_computes_its_prompt_once_for_each_part() -> None:
    """Prompts of 20 and four answers of 5: 40 of 100 tokens together, 60 in two micro-batches."""
    batch = make_groups([(20, [5, 5, 5, 5])])
    share_prompts(batch)
    halves = [batch.select([0, 1]), batch.select([2, 3])]
    assert computed_token_share([batch]) == 0.4 and computed_token_share(halves) == 0.6


def test_nothing_is_shared_in_a_batch_without_sequences() -> None:
    """This happens in a step whose trajectories were all lost."""
    batch = make_groups([(3, [28, 28])]).select([])
    share_prompts(batch)
    assert saved_token_share(batch) == 0 and PREFIXES not in batch.columns


@given(st.lists(st.integers(1, 20), min_size=1, max_size=10), st.integers(1, 4))
def test_join_undoes_split(lengths: list[int], num_ranks: int) -> None:
    """What each rank computes per token returns to the token it was computed for."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    batch = TokenBatch(offsets, {"input_ids": torch.arange(int(offsets[-1]))})
    split = split_by_work(batch, num_ranks)
    outputs = [shard.tokens["input_ids"] * 2 for shard in split.shards]
    assert torch.equal(join_tokens(outputs, split, batch), torch.arange(int(offsets[-1])) * 2)


@given(st.lists(st.sampled_from("abcdefgh"), max_size=40), st.integers(1, 5))
def test_groups_stay_together_and_parts_are_even(groups: list[str], parts: int) -> None:
    """Every index once, no group in two parts, and no part larger by more than a group."""
    divided = split_groups(groups, parts)
    assert sorted(i for part in divided for i in part) == list(range(len(groups)))
    sizes = [len(part) for part in divided]
    if len(set(groups)) < parts:
        assert max(sizes) - min(sizes) <= 1
        return
    assert sum(len({groups[i] for i in part}) for part in divided) == len(set(groups))
    assert max(sizes) - min(sizes) <= max(map(groups.count, groups), default=0)


def test_equal_groups_go_to_the_parts_in_turn() -> None:
    """Parts differ by at most one group and keep the order."""
    groups = [f"1/{prompt}" for prompt in range(5) for _ in range(3)]
    assert split_groups(groups, 2) == [
        [0, 1, 2, 6, 7, 8, 12, 13, 14],
        [3, 4, 5, 9, 10, 11],
    ]


@given(lengths_strategy, st.integers(1, 5))
def test_balance_is_a_partition_with_bounded_spread(lengths: list[int], parts: int) -> None:
    """Every sequence is in one part, and no part exceeds another by more than a sequence."""
    divided = balance(lengths, parts)
    assert sorted(i for part in divided for i in part) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in part) for part in divided]
    assert max(loads) - min(loads) <= max(lengths)


@given(lengths_strategy, st.integers(1, 60), st.integers(1, 5))
def test_pack_respects_the_budget(lengths: list[int], budget: int, min_count: int) -> None:
    """Micro-batches have each sequence once; only a single over-long one exceeds the budget."""
    bins = pack(lengths, budget, min_count)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert len(bins) >= min_count
    for b in bins:
        assert sum(lengths[i] for i in b) <= budget or len(b) == 1


@given(lengths_strategy, st.integers(1, 40))
def test_pack_is_first_fit_decreasing(lengths: list[int], budget: int) -> None:
    """A plain loop finds the first micro-batch with enough free tokens."""
    bins: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = (b for b in bins if sum(lengths[k] for k in b) + lengths[i] <= budget)
        chosen = next(fits, None)
        if chosen is None:
            bins.append(chosen := [])
        chosen.append(i)
    assert pack(lengths, budget) == [sorted(b) for b in bins]


def test_the_longest_sequences_are_divided_first() -> None:
    """In the batch's order, the long one would be added to half of the others."""
    assert balance([1, 1, 1, 1, 4], 2) == [[4], [0, 1, 2, 3]]
    assert balance([2, 3, 4, 5, 6, 7], 3) == [[0, 5], [1, 4], [2, 3]]


def test_micro_batches_are_filled_by_the_longest_first() -> None:
    """In the batch's order the long ones would not fit; empty micro-batches come last."""
    assert pack([1, 1, 4, 5], 6) == [[0, 3], [1, 2]]
    assert pack([3, 9, 2, 1], 6, min_count=4) == [[1], [0, 2, 3], [], []]
    assert pack([], 6, min_count=0) == []
