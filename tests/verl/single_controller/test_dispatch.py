"""Dividing a batch over ranks and joining the answers loses and moves nothing."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.single_controller.dispatch import join_tokens, split_by_work, split_groups
from verl.types import TokenBatch


@given(st.lists(st.integers(1, 20), min_size=1, max_size=10), st.integers(1, 4))
def test_join_undoes_split(lengths: list[int], num_ranks: int) -> None:
    """What each rank computes per token returns to the token it was computed for."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    batch = TokenBatch(offsets, {"input_ids": torch.arange(int(offsets[-1]))})
    split = split_by_work(batch, num_ranks)
    outputs = [shard.tokens["input_ids"] * 2 for shard in split.shards]
    assert torch.equal(join_tokens(outputs, split, batch), torch.arange(int(offsets[-1])) * 2)


@given(st.lists(st.sampled_from("abcdefgh"), max_size=40), st.integers(1, 5))
def test_siblings_stay_together_and_parts_stay_even(groups: list[str], parts: int) -> None:
    """Every index once; no group in two parts, and no part ahead by more than one group."""
    dealt = split_groups(groups, parts)
    assert sorted(i for part in dealt for i in part) == list(range(len(groups)))
    sizes = [len(part) for part in dealt]
    if len(set(groups)) < parts:
        assert max(sizes) - min(sizes) <= 1
        return
    assert sum(len({groups[i] for i in part}) for part in dealt) == len(set(groups))
    assert max(sizes) - min(sizes) <= max(map(groups.count, groups), default=0)


def test_equal_groups_are_dealt_in_turn() -> None:
    """The default recipe in small: parts differ by one group at most, in the order asked."""
    groups = [f"1/{prompt}" for prompt in range(5) for _ in range(3)]
    assert split_groups(groups, 2) == [
        [0, 1, 2, 6, 7, 8, 12, 13, 14],
        [3, 4, 5, 9, 10, 11],
    ]
