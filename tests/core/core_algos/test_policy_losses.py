"""Policy losses, compared with their published objectives in double precision."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.core.jagged_batches import CLOSE, Batch, batches, ppo_losses
from verl.config import ActorConfig
from verl.core_algos.jagged import sequence_ids
from verl.core_algos.losses import loss_weights, weighted_sum
from verl.core_algos.policy_losses import (
    POLICY_LOSSES,
    PolicyLossInputs,
    cispo,
    gpg,
    gspo,
    likelihood_loss,
    ppo,
)


def published_policy_loss(log_ratio: float, a: float, low: float, high: float, c: float) -> float:
    """Compute dual-clip PPO in its published form: an objective, negated."""
    ratio = math.exp(log_ratio)
    objective = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    return -(max(objective, c * a) if a < 0 else objective)


def test_policy_loss_diagnostics_and_zero_gradients() -> None:
    """Clipped tokens are counted and have a gradient of 0; extreme ratios stay finite."""
    #                          inside  above   below   below   dual  extreme
    ratio = torch.tensor([1.1, 1.5, 0.5, 0.5, 4.0, 1e30], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    log_probs = ratio.log().requires_grad_()
    losses, diagnostics = ppo_losses(
        log_probs, torch.zeros(6, dtype=torch.float64), advantages, 0.2, 0.2
    )
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-1.1, -1.2, -0.5, 0.8, 3.0, 3.0])
    assert diagnostics.clipped.tolist() == [0, 1, 0, 1, 0, 0]
    assert diagnostics.dual_clipped.tolist() == [0, 0, 0, 0, 1, 1]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-1.1, 0, -0.5, 0, 0, 0])
    assert not diagnostics.approx_kl.requires_grad


def test_a_dual_clip_that_would_bound_every_loss_is_refused() -> None:
    """At 1 it would stop all gradients of negative advantages."""
    x = torch.zeros(1)
    with pytest.raises(ValueError, match=r"clip_c=1\.0"):
        ppo(PolicyLossInputs(x, x, x, x.long(), clip_c=1.0))


def inputs_of(batch: Batch, scale: float = 0.3) -> tuple[PolicyLossInputs, Tensor]:
    """Return a batch's policy tokens with random log-probs, and their loss weights."""
    mask = batch.mask
    old = batch.column(1)[mask]
    log_probs = (old + batch.column(2, scale)[mask]).requires_grad_()
    ids = sequence_ids(batch.offsets)
    advantages = torch.arange(1.0, batch.num_seqs + 1, dtype=torch.float64)
    advantages[1::2] *= -1.0
    inputs = PolicyLossInputs(log_probs, old, advantages[ids][mask], ids[mask], 0.1, 0.2)
    weights = loss_weights(mask, batch.offsets, "seq-mean-token-mean")[mask].double()
    return inputs, weights


@given(batches)
def test_gspo_is_the_objective_of_sequence_ratios_with_its_gradient(batch: Batch) -> None:
    """Value and gradient are those of the clipped surrogate of s = exp(mean log-ratio)."""
    inputs, weights = inputs_of(batch)
    got = weighted_sum(gspo(inputs)[0], weights)
    free = inputs.log_probs.detach().clone().requires_grad_()
    objectives = []
    for i in range(batch.num_seqs):
        own = inputs.sequence_ids == i
        if own.any():
            s = (free[own] - inputs.old_log_probs[own]).mean().exp()
            a = inputs.advantages[own][0]
            objectives.append(torch.minimum(s * a, s.clamp(0.9, 1.2) * a))
    if not objectives:
        assert got.item() == 0.0
        return
    expected = -torch.stack(objectives).mean()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(got, inputs.log_probs)
    (by_hand,) = torch.autograd.grad(expected, free)
    torch.testing.assert_close(gradient, by_hand, rtol=1e-6, atol=1e-6)


@given(batches)
def test_cispo_and_gpg_have_the_gradients_of_their_papers(batch: Batch) -> None:
    """d/dlogπ is -clip(ratio) A for CISPO, at all tokens, and -A for GPG."""
    inputs, _ = inputs_of(batch)
    ratio = (inputs.log_probs - inputs.old_log_probs).exp().detach()
    bounded = ratio.clamp(0.9, 1.2)
    cases = ((cispo, bounded, bounded != ratio), (gpg, torch.ones_like(ratio), ratio < 0))
    for loss, factor, clipped in cases:
        losses, seen = loss(inputs)
        (gradient,) = torch.autograd.grad(losses.sum(), inputs.log_probs)
        torch.testing.assert_close(gradient, -factor * inputs.advantages, **CLOSE)
        assert seen.clipped.bool().tolist() == clipped.tolist()


def loss_by_loop(
    name: str, log_ratios: Sequence[float], k: int, log_prob: float, a: float
) -> float:
    """Compute the loss of a sequence's token k as in each paper; clips 0.1, 0.2 and (ppo) 3."""
    ratio = math.exp(log_ratios[k])
    match name:
        case "ppo":
            return published_policy_loss(log_ratios[k], a, 0.1, 0.2, 3.0)
        case "gspo":
            return published_policy_loss(float(np.mean(log_ratios)), a, 0.1, 0.2, math.inf)
        case "cispo":
            return -min(max(ratio, 0.9), 1.2) * a * log_prob
        case "gpg":
            return -a * log_prob
    raise AssertionError(f"no loop states {name}: write one")


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
@given(batch=batches)
def test_every_loss_follows_its_loop(name: str, batch: Batch) -> None:
    """Each entry of the registry is its published objective, token by token."""
    inputs, _ = inputs_of(batch)
    losses = POLICY_LOSSES[name](inputs)[0].tolist()
    log_ratio = (inputs.log_probs - inputs.old_log_probs).tolist()
    expected, start = [], 0
    for own in batch.policy_positions():
        here = slice(start, start + len(own))
        pairs = zip(inputs.log_probs[here].tolist(), inputs.advantages[here].tolist(), strict=True)
        expected += [
            loss_by_loop(name, log_ratio[here], k, log_prob, a)
            for k, (log_prob, a) in enumerate(pairs)
        ]
        start += len(own)
    assert losses == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", list(POLICY_LOSSES))
@given(batch=batches)
def test_every_loss_starts_at_the_policy_gradient(name: str, batch: Batch) -> None:
    """For an unchanged policy, each loss has the gradient -A (GSPO: its sequence's mean)."""
    inputs, weights = inputs_of(batch, scale=0.0)
    losses, _ = POLICY_LOSSES[name](inputs)
    (gradient,) = torch.autograd.grad(weighted_sum(losses, weights), inputs.log_probs)
    torch.testing.assert_close(gradient, -inputs.advantages * weights, **CLOSE)


@given(st.lists(st.tuples(st.floats(-2, 2), st.booleans(), st.integers(0, 3)), max_size=20))
def test_likelihood_loss_penalises_drops_of_good_turns(rows: list[tuple[float, bool, int]]) -> None:
    """LLDS by a loop: in preserved turns that dropped as a whole, tokens cost their drop."""
    drops = torch.tensor([d for d, _, _ in rows], dtype=torch.float64)
    kept = torch.tensor([k for _, k, _ in rows], dtype=torch.bool)
    gates = torch.tensor([g for _, _, g in rows], dtype=torch.int64)
    got = likelihood_loss(-drops, torch.zeros_like(drops), kept, gates)
    for cost, (drop, is_kept, gate) in zip(got.tolist(), rows, strict=True):
        total = sum(d for d, k, g in rows if k and g == gate)
        if abs(total) > 1e-9:
            assert cost == (max(drop, 0.0) if is_kept and total > 0 else 0.0)


def test_likelihood_loss_gradient_passes_gradcheck() -> None:
    """It raises dropped tokens of a dropped turn that is kept, and is 0 for the others."""
    old = torch.zeros(5, dtype=torch.float64)
    start = torch.tensor([-0.5, 0.1, 0.7, -0.2, -0.3], dtype=torch.float64, requires_grad=True)
    kept, gates = torch.arange(5) < 4, torch.tensor([0, 0, 1, 1, 2])
    assert torch.autograd.gradcheck(lambda x: likelihood_loss(x, old, kept, gates).sum(), (start,))
    likelihood_loss(start, old, kept, gates).sum().backward()
    assert start.grad is not None and start.grad.tolist() == [-1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_float32_leaves_loss_and_gradient_finite(
    name: str, advantage: float
) -> None:
    """A token 200 nats more or less likely than when it was sampled: exp(200) is infinite."""
    old = torch.tensor([-201.0, -1.0, -1.0])
    log_probs = torch.tensor([-1.0, -201.0, -1.0], requires_grad=True)
    ids = torch.tensor([0, 1, 2])
    inputs = PolicyLossInputs(log_probs, old, torch.full((3,), advantage), ids)
    losses, _ = POLICY_LOSSES[name](inputs)
    losses.sum().backward()
    assert log_probs.grad is not None and bool(log_probs.grad.isfinite().all())
    assert bool(losses.isfinite().all())


def test_ratios_are_bounded_at_20_nats_and_clipped_by_default_options() -> None:
    """The defaults of the function are those of the options."""
    old, ids = torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    inputs = PolicyLossInputs(torch.tensor([-200.0, 0.0, 200.0]), old, old, ids)
    assert inputs.ratio.tolist() == pytest.approx([math.exp(-20), 1.0, math.exp(20)])
    low, high, ceiling = inputs.clip_low, inputs.clip_high, inputs.clip_c
    assert (low, high, ceiling) == (ActorConfig.clip_ratio, low, ActorConfig.clip_ratio_c)
