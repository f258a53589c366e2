"""Trajectories and the jagged batch: alignment, masks by origin, selection, balance, packing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.types import (
    Origin,
    Prompt,
    Segment,
    TokenBatch,
    Trajectory,
    balance,
    pack,
    start_trajectory,
)


def prompt(ids: tuple[int, ...] = (1, 2)) -> Prompt:
    return Prompt("file#0", ids, "geo", ("gold",))


def dialogue(*policy: tuple[int, ...], group: str = "g") -> Trajectory:
    """A trajectory whose policy runs are each followed by the observation (7, 7)."""
    trajectory = start_trajectory(prompt(), group=group)
    for ids in policy:
        trajectory.segments.append(Segment(Origin.POLICY, ids, log_probs=(-0.5,) * len(ids)))
        trajectory.segments.append(Segment(Origin.OBSERVATION, (7, 7)))
    return trajectory


def test_masks_come_from_the_origin_not_from_ids() -> None:
    """A pad id (0) that the policy sampled is a policy token, in the middle of a response too."""
    batch = TokenBatch.from_trajectories([dialogue((5, 0, 5), (0,))])
    assert batch.tokens["input_ids"].tolist() == [1, 2, 5, 0, 5, 7, 7, 0, 7, 7]
    assert batch.tokens["policy_mask"].tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 0, 0]
    assert batch.tokens["response_mask"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]


def test_rollout_log_probs_are_aligned_with_their_tokens() -> None:
    """A log-prob stands at the token it belongs to; other tokens hold 0."""
    batch = TokenBatch.from_trajectories([dialogue((5, 6))])
    assert batch.tokens["rollout_log_probs"].tolist() == [0, 0, -0.5, -0.5, 0, 0]


def test_a_policy_segment_without_log_probs_is_refused() -> None:
    """Tokens that no engine vouches for cannot enter as the policy's."""
    with pytest.raises(AssertionError, match="log-probs"):
        Segment(Origin.POLICY, (1, 2))


lengths_strategy = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def numbered(lengths: list[int]) -> TokenBatch:
    """A batch whose token ids tell sequence and position."""
    ids = [100 * seq + pos for seq, length in enumerate(lengths) for pos in range(length)]
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return TokenBatch(
        torch.tensor(offsets),
        {"input_ids": torch.tensor(ids)},
        {"scores": torch.arange(len(lengths)).float()},
        {"group": [str(i) for i in range(len(lengths))]},
    )


@given(lengths_strategy, st.randoms(use_true_random=False))
def test_select_keeps_each_sequence_whole(lengths: list[int], random) -> None:
    """Any reordering carries tokens, rows and columns of a sequence together."""
    order = random.sample(range(len(lengths)), len(lengths))
    chosen = numbered(lengths).select(order)
    expected = [[100 * i + p for p in range(lengths[i])] for i in order]
    assert [s.tolist() for s in chosen.sequences("input_ids")] == expected
    assert chosen.rows["scores"].tolist() == [float(i) for i in order]
    assert chosen.columns["group"] == [str(i) for i in order]


@given(lengths_strategy, st.integers(1, 4))
def test_concat_of_parts_is_the_batch(lengths: list[int], cut: int) -> None:
    """Cutting and joining gives the batch back."""
    batch, at = numbered(lengths), min(cut, len(lengths))
    parts = [batch.select(range(at)), batch.select(range(at, len(lengths)))]
    joined = TokenBatch.concat(parts)
    assert torch.equal(joined.offsets, batch.offsets)
    assert torch.equal(joined.tokens["input_ids"], batch.tokens["input_ids"])
    assert joined.columns == batch.columns


@given(lengths_strategy, st.integers(1, 5))
def test_balance_is_a_partition_with_bounded_spread(lengths: list[int], parts: int) -> None:
    """Every sequence goes to one part, and no part exceeds another by more than a sequence."""
    divided = balance(lengths, parts)
    assert sorted(i for part in divided for i in part) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in part) for part in divided]
    assert max(loads) - min(loads) <= max(lengths)


@given(lengths_strategy, st.integers(1, 60), st.integers(1, 5))
def test_pack_respects_the_budget(lengths: list[int], budget: int, at_least: int) -> None:
    """Micro-batches hold every sequence once; only a lone over-long one exceeds the budget."""
    bins = pack(lengths, budget, at_least)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert len(bins) >= at_least
    for b in bins:
        assert sum(lengths[i] for i in b) <= budget or len(b) == 1


def test_the_longest_sequences_are_divided_first() -> None:
    """In the order of the batch, the long one would come on top of half of the others."""
    assert balance([1, 1, 1, 1, 4], 2) == [[4], [0, 1, 2, 3]]
    assert balance([2, 3, 4, 5, 6, 7], 3) == [[0, 5], [1, 4], [2, 3]]
