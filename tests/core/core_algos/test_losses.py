"""Aggregation, value loss and entropy, compared with manual formulas."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.core.jagged_batches import DIALOGUES, Batch, batches, make_batch, ppo_losses
from verl.core_algos.kl import KL_KINDS, kl_penalty
from verl.core_algos.losses import (
    AGGREGATIONS,
    loss_weights,
    value_loss,
    weighted_sum,
)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_line_03_observation_log_probs_get_exactly_no_gradient(aggregation: str) -> None:
    """Policy, KL and value losses have no gradient at tokens off the policy, even extreme ones."""
    mask, offsets = DIALOGUES.mask, DIALOGUES.offsets
    log_probs = torch.where(mask, DIALOGUES.column(1), -1e4).requires_grad_()
    values = torch.where(mask, DIALOGUES.column(2), 1e3).requires_grad_()
    weights = loss_weights(mask, offsets, aggregation, norm_length=8)
    losses, _ = ppo_losses(log_probs, DIALOGUES.column(1) + 0.01, DIALOGUES.column(3), 0.2, 0.2)
    for kind in KL_KINDS:
        losses = losses + kl_penalty(log_probs, DIALOGUES.column(5), kind)
    losses = losses + value_loss(values, DIALOGUES.column(2), DIALOGUES.column(6), 0.5)
    weighted_sum(losses, weights).backward()
    for leaf in (log_probs, values):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad[~mask], torch.zeros_like(leaf.grad[~mask]))
        assert (leaf.grad[mask] != 0).any()


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    """The error for a misspelt aggregation lists the known ones; one for a length says the fix."""
    mask, offsets = torch.ones(1, dtype=torch.bool), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="'mean'"):
        loss_weights(mask, offsets, "mean")
    with pytest.raises(ValueError, match="norm_length=None"):
        loss_weights(mask, offsets, "seq-mean-token-sum-norm")


def test_losses_of_weight_0_are_not_read() -> None:
    """An observation's loss may be infinite or NaN."""
    losses, weights = torch.tensor([math.nan, 2.0, math.inf]), torch.tensor([0.0, 0.5, 0.0])
    assert float(weighted_sum(losses, weights)) == 1.0


def aggregate_by_loop(losses: Tensor, batch: Batch, aggregation: str, norm_length: int) -> float:
    """Aggregate as the name says, sequence by sequence."""
    own = [[float(losses[t]) for t in p] for p in batch.policy_positions() if p]
    if not own:
        return 0.0
    if aggregation == "token-mean":
        return float(np.mean([x for row in own for x in row]))
    per_sequence: dict[str, Callable[[list[float]], float]] = {
        "seq-mean-token-sum": sum,
        "seq-mean-token-mean": lambda row: sum(row) / len(row),
        "seq-mean-token-sum-norm": lambda row: sum(row) / norm_length,
    }
    return float(np.mean([per_sequence[aggregation](row) for row in own]))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(batch=batches, data=st.data())
def test_loss_weights_give_the_named_mean_and_any_split_adds_up(
    aggregation: str, batch: Batch, data: st.DataObject
) -> None:
    """Weights reproduce the aggregation, and micro-batches and ranks sum to the unsplit loss."""
    losses = batch.column(1)
    weights = loss_weights(batch.mask, batch.offsets, aggregation, norm_length=7)
    whole = weighted_sum(losses, weights)
    by_hand = aggregate_by_loop(losses, batch, aggregation, 7)
    assert float(whole) == pytest.approx(by_hand, rel=1e-6, abs=1e-6)
    parts = data.draw(st.lists(st.integers(0, 2), min_size=batch.num_seqs, max_size=batch.num_seqs))
    split = 0.0
    for part in range(3):
        index = [
            t
            for (a, b), p in zip(batch.spans, parts, strict=True)
            if p == part
            for t in range(a, b)
        ]
        split += float(weighted_sum(losses[index], weights[index]))
    assert split == pytest.approx(float(whole), rel=1e-12, abs=1e-12)


@given(st.lists(st.tuples(*[st.floats(-3, 3)] * 3), min_size=1, max_size=20), st.floats(0.1, 1))
def test_value_loss_is_the_larger_of_plain_and_clipped(
    rows: list[tuple[float, float, float]], clip_range: float
) -> None:
    """Each loss is half the larger squared error of the value and the clipped value."""
    values, old, returns = torch.tensor(rows, dtype=torch.float64).T
    got = value_loss(values, old, returns, clip_range)
    expected = [
        max((v - r) ** 2, (min(max(v, o - clip_range), o + clip_range) - r) ** 2) / 2
        for v, o, r in rows
    ]
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_gradients_of_both_losses_pass_gradcheck() -> None:
    """Analytic gradients of the aggregated losses equal numeric ones away from the kinks."""
    batch = make_batch([[False, True, True, False, True], [True, False, True], [True] * 4], seed=3)
    old, advantages, returns = batch.column(1), batch.column(2), batch.column(3)
    ref = batch.column(4)
    shift = torch.tensor([0.05, -0.1, 0.5, -0.7, 1.6, 0.1, -0.05, 0.9, -0.9, 0.02, 0.3, 1.3])
    start = (old + shift.double()).requires_grad_()
    for aggregation in AGGREGATIONS:
        weights = loss_weights(batch.mask, batch.offsets, aggregation, 5).double()

        def actor(x: Tensor, weights: Tensor = weights) -> Tensor:
            losses = ppo_losses(x, old, advantages, 0.2, 0.28)[0]
            return weighted_sum(losses + 0.1 * kl_penalty(x, ref, "k3"), weights)

        def critic(x: Tensor, weights: Tensor = weights) -> Tensor:
            return weighted_sum(value_loss(x, old, returns, 0.4), weights)

        assert torch.autograd.gradcheck(actor, (start,))
        assert torch.autograd.gradcheck(critic, (start,))
