"""KL estimators, KL in the reward and controllers, compared with manual formulas."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given

from tests.core.jagged_batches import CLOSE, DIALOGUES, Batch, batches
from verl.core_algos.kl import (
    KL_KINDS,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_in_reward,
    kl_penalty,
    mean_sequence_kl,
)


def test_line_03_observations_do_not_affect_kl_reward_or_its_mean() -> None:
    """KL in the reward, and the KL for the controller, are computed from policy tokens only."""
    mask = DIALOGUES.mask
    rewards, ref = DIALOGUES.column(1), DIALOGUES.column(3)
    log_probs = torch.where(mask, DIALOGUES.column(2), math.nan)
    got = apply_kl_in_reward(rewards, log_probs, ref, mask, 0.1, "k1")
    expected = torch.where(mask, rewards - 0.1 * (DIALOGUES.column(2) - ref), rewards)
    torch.testing.assert_close(got, expected, **CLOSE)
    kl = mean_sequence_kl(log_probs, ref, mask, DIALOGUES.offsets, "k1")
    difference = DIALOGUES.column(2) - ref
    by_hand = (difference[[2, 3, 7]].mean() + difference[9]) / 2
    assert float(kl) == pytest.approx(float(by_hand), rel=1e-6)


KL_BY_HAND: dict[str, Callable[[float], float]] = {
    "kl": lambda d: d,
    "k1": lambda d: d,
    "abs": abs,
    "mse": lambda d: d * d / 2,
    "k2": lambda d: d * d / 2,
    "low_var_kl": lambda d: min(math.exp(-max(min(d, 20), -20)) - 1 + max(min(d, 20), -20), 10),
    "k3": lambda d: min(math.exp(-max(min(d, 20), -20)) - 1 + max(min(d, 20), -20), 10),
}


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_estimators_follow_their_formulas(kind: str) -> None:
    """Every estimator equals its formula, including the clamped k3."""
    differences = [-1000.0, -25.0, -2.0, -0.5, 0.0, 0.3, 1.5, 9.0, 25.0]
    log_probs = torch.tensor(differences, dtype=torch.float64)
    got = kl_penalty(log_probs - 1.0, torch.full_like(log_probs, -1.0), kind)
    assert got.tolist() == pytest.approx([KL_BY_HAND[kind](d) for d in differences], abs=1e-9)


@pytest.mark.parametrize("kind", ["low_var_kl", "k3"])
def test_k3_has_no_gradient_beyond_its_limits(kind: str) -> None:
    """Where exp would be infinite, its gradient would be NaN and spoil the whole step."""
    log_probs = torch.tensor([-1000.0, -100.0, 0.5, 100.0, 1000.0], requires_grad=True)
    kl_penalty(log_probs, torch.zeros(5), kind).sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([0, 0, 1 - math.exp(-0.5), 0, 0])


def test_kl_controllers_follow_ziegler() -> None:
    """The adaptive coefficient changes by the clipped error, the fixed one never."""
    adaptive = AdaptiveKLController(value=0.2, target=6.0, horizon=100)
    assert adaptive.next_value(6.6, num_seqs=10) == pytest.approx(0.2 * (1 + 0.1 * 10 / 100))
    assert adaptive.next_value(600.0, num_seqs=10) == pytest.approx(0.2 * 1.02)
    assert adaptive.next_value(0.0, num_seqs=10) == pytest.approx(0.2 * 0.98)
    assert FixedKLController(0.2).next_value(600.0, num_seqs=10) == 0.2


@pytest.mark.parametrize("kind", KL_KINDS)
@given(batch=batches)
def test_kl_reward_and_its_mean_follow_loops(kind: str, batch: Batch) -> None:
    """Each policy token is penalised by its KL; the controller gets the mean of sequence means."""
    rewards, log_probs, ref = batch.column(1), batch.column(2, 2.0), batch.column(3, 2.0)
    got = apply_kl_in_reward(rewards, log_probs, ref, batch.mask, 0.3, kind)
    expected, means = rewards.clone(), []
    for own in batch.policy_positions():
        costs = [KL_BY_HAND[kind](float(log_probs[t] - ref[t])) for t in own]
        for t, cost in zip(own, costs, strict=True):
            expected[t] -= 0.3 * cost
        means += [float(np.mean(costs))] if own else []
    torch.testing.assert_close(got, expected, **CLOSE)
    mean = mean_sequence_kl(log_probs, ref, batch.mask, batch.offsets, kind)
    assert float(mean) == pytest.approx(float(np.mean(means)) if means else 0.0, rel=1e-6, abs=1e-6)


def test_unknown_estimators_and_targets_are_refused() -> None:
    """The error for a misspelt estimator lists the known ones; a target must be > 0."""
    x = torch.zeros(1)
    with pytest.raises(ValueError, match="'k4'"):
        kl_penalty(x, x, "k4")
    for target, horizon in ((0.0, 10), (-1.0, 10), (0.1, 0), (0.1, -1)):
        with pytest.raises(ValueError, match=f"target={target}, horizon={horizon}"):
            AdaptiveKLController(0.1, target, horizon)
