"""Dividing a batch over ranks and joining the answers loses and moves nothing."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.protocol import DataProto
from verl.single_controller.dispatch import join_tokens, split_by_tokens, split_evenly


@given(st.lists(st.integers(1, 20), min_size=1, max_size=10), st.integers(1, 4))
def test_join_undoes_split(lengths: list[int], num_ranks: int) -> None:
    """What each rank computes per token returns to the token it was computed for."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    batch = DataProto(offsets, {"input_ids": torch.arange(int(offsets[-1]))})
    split = split_by_tokens(batch, num_ranks)
    outputs = [shard.tokens["input_ids"] * 2 for shard in split.shards]
    assert torch.equal(join_tokens(outputs, split, batch), torch.arange(int(offsets[-1])) * 2)


@given(st.integers(0, 30), st.integers(1, 5))
def test_split_evenly_deals_round_robin(count: int, parts: int) -> None:
    """Every index once, and part sizes differ by at most one."""
    dealt = split_evenly(count, parts)
    assert sorted(i for part in dealt for i in part) == list(range(count))
    sizes = [len(part) for part in dealt]
    assert max(sizes) - min(sizes) <= 1
