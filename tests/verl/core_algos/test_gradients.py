"""Gradients of every loss: by finite differences in double precision, away from kinks.

Where a loss stops a gradient on purpose, finite differences see the stopped part move and autograd
does not: there the gradient is compared with its formula, and finite differences with the surrogate
in which the stopped part is a constant.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from tests.oracles.chunk import chunk_of_logits
from verl.core_algos.kl import KL_KINDS, kl_penalty
from verl.core_algos.losses import (
    AGGREGATIONS,
    loss_weights,
    value_loss,
    weighted_sum,
)
from verl.core_algos.mismatch import importance_weights
from verl.core_algos.policy_losses import (
    POLICY_LOSSES,
    PolicyLossInputs,
    cispo,
    gpg,
    gspo,
    likelihood_loss,
    ppo,
)

# Ratios inside the clip, beyond it on either side, and beyond the dual clip; no kink within 0.02.
LOG_RATIO = [0.05, -0.1, 0.4, -0.5, 0.6, -0.4, 1.5, -25.0]
ADVANTAGES = [1.0, -0.7, 0.9, 1.1, -1.2, -0.8, -0.6, 0.5]
IDS = [0, 0, 0, 1, 1, 2, 2, 3]


def column(figures: list[float]) -> Tensor:
    return torch.tensor(figures, dtype=torch.float64)


OLD = column([-0.3, -1.0, -2.0, -0.7, -0.1, -1.4, -2.2, -0.5])


def inputs(log_probs: Tensor, old: Tensor = OLD, **options: float) -> PolicyLossInputs:
    return PolicyLossInputs(log_probs, old, column(ADVANTAGES), torch.tensor(IDS), **options)


def log_probs() -> Tensor:
    return (OLD + column(LOG_RATIO)).requires_grad_()


def gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return the gradient of the sum of a loss per token."""
    (found,) = torch.autograd.grad(loss(at).sum(), at)
    return found


def by_token(name: str, **options: float) -> Callable[[Tensor], Tensor]:
    return lambda x: POLICY_LOSSES[name](inputs(x, **options))[0]


STOPPED = {"gspo", "cispo"}
"""Losses with a ratio that is partly detached from the gradient."""


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - STOPPED))
def test_policy_losses_by_finite_differences(name: str) -> None:
    """Inside the clip, beyond it on either side, beyond the dual clip, and at the ratio's bound."""
    assert gradcheck(by_token(name), log_probs())


def test_ppo_gradient_is_that_of_the_ratio_or_0_if_clipped() -> None:
    """It is -A ρ inside; 0 above for A > 0, below for A < 0, and beyond the dual clip."""
    expected = -column(ADVANTAGES) * column(LOG_RATIO).exp()
    for clipped in (2, 5, 6, 7):  # above, below, dual, bounded to exp(-20)
        expected[clipped] = 0.0
    torch.testing.assert_close(gradient(by_token("ppo"), log_probs()), expected)


def test_gpg_gradient_is_minus_the_advantage() -> None:
    """The loss is -A log π."""
    found = gradient(lambda x: gpg(inputs(x))[0], log_probs())
    torch.testing.assert_close(found, -column(ADVANTAGES))


def geometric_mean(x: Tensor) -> Tensor:
    """Compute each token's s = exp(mean of log ρ over its sequence), by a loop."""
    d, found = x - OLD, torch.zeros_like(x)
    for sequence in set(IDS):
        members = torch.tensor([i == sequence for i in IDS])
        found[members] = d[members].mean().exp()
    return found


def test_gspo_gradient_is_the_sequences_ratio_times_the_advantage() -> None:
    """It is -A s at the token itself unless clipped, else 0 (Zheng et al. 2025)."""
    x, a = log_probs(), column(ADVANTAGES)
    s = geometric_mean(x.detach())
    decided = torch.where(a > 0, s > 1.2, s < 0.8) | (s < 3e-9)
    assert decided.any() and not decided.all()
    expected = torch.where(decided, 0.0, -a * s)
    torch.testing.assert_close(gradient(by_token("gspo"), x), expected)


def test_gspo_surrogate_by_finite_differences() -> None:
    """With sg[s] and sg[π] fixed at the current policy, the loss is differentiable: s π / π_now."""
    now = log_probs().detach()
    # `gspo` at a moved point: moving π_old along keeps the mean of the log-ratio.
    s = geometric_mean(now)

    def surrogate(x: Tensor) -> Tensor:
        ids = torch.arange(len(x))  # one token per sequence: the mean is the token's own log-ratio
        held = PolicyLossInputs(x, now - s.log(), column(ADVANTAGES), ids, clip_c=1e12)
        return ppo(held)[0]

    assert gradcheck(surrogate, log_probs())
    torch.testing.assert_close(
        gradient(surrogate, log_probs()), gradient(by_token("gspo"), log_probs())
    )


def test_gspo_of_one_advantage_a_sequence_has_the_sequence_objectives_gradient() -> None:
    """Under `seq-mean-token-mean` the token form equals -A s of whole sequences, differentiated."""
    advantage = column([0.4, -0.3, 0.8, 0.6])
    ids = torch.tensor(IDS)

    def tokens(x: Tensor) -> Tensor:
        losses, _ = gspo(PolicyLossInputs(x, OLD, advantage[ids], ids, 30.0, 30.0))
        lengths = ids.bincount()
        return losses / (lengths[ids] * len(advantage))

    def sequences(x: Tensor) -> Tensor:
        means = torch.stack([(x - OLD)[ids == i].mean() for i in range(len(advantage))])
        return -advantage * means.exp() / len(advantage)

    near = (OLD + column([0.05, -0.1, 0.4, -0.5, 0.5, -0.4, 1.5, -0.2])).requires_grad_()
    assert gradcheck(sequences, near)
    torch.testing.assert_close(gradient(tokens, near), gradient(sequences, near))


def test_cispo_gradient_is_the_clipped_ratio_times_the_advantage() -> None:
    """It is -A clip(ρ) at every token, clipped or not (MiniMax 2025, eq. 4)."""
    expected = -column(ADVANTAGES) * column(LOG_RATIO).exp().clamp(0.8, 1.2)
    torch.testing.assert_close(gradient(by_token("cispo"), log_probs()), expected)


def test_cispo_surrogate_by_finite_differences() -> None:
    """With the weight fixed at the current policy's, the loss is a weighted log-prob."""
    weight = column(LOG_RATIO).exp().clamp(0.8, 1.2)
    surrogate = lambda x: -weight * column(ADVANTAGES) * x  # noqa: E731
    assert gradcheck(surrogate, log_probs())
    torch.testing.assert_close(
        gradient(surrogate, log_probs()), gradient(lambda x: cispo(inputs(x))[0], log_probs())
    )


@pytest.mark.parametrize("name", sorted(STOPPED))
def test_finite_differences_refuse_the_losses_with_a_stopped_gradient(name: str) -> None:
    """The exceptions above are necessary: the detached ratio does change."""
    assert not gradcheck(by_token(name), log_probs(), raise_exception=False)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_importance_weights_scale_the_gradient(name: str, level: str) -> None:
    """The weights for the engine's mismatch are constants of any loss."""
    rollout = OLD + column([0.1, -0.8, 0.3, -1.0, 0.2, 0.5, 1.0, -0.1])
    weights = importance_weights(OLD, rollout, torch.tensor(IDS), level, 2.0, 2.5)
    assert (weights == 0).any() and (weights == 2.0).any()
    found = gradient(lambda x: by_token(name)(x) * weights, log_probs())
    torch.testing.assert_close(found, weights * gradient(by_token(name), log_probs()))
    if name not in STOPPED:
        assert gradcheck(lambda x: by_token(name)(x) * weights, log_probs())


def test_value_loss_by_finite_differences() -> None:
    """Inside the range, where the plain error is larger, and where the clipped one is."""
    old = column([0.0, 0.0, 0.0, 0.0])
    returns = column([1.0, 2.0, -1.0, 0.1])
    values = column([0.2, 0.9, 0.9, -0.8]).requires_grad_()
    loss = lambda x: value_loss(x, old, returns, 0.5)  # noqa: E731
    assert gradcheck(loss, values)
    # The second is clipped to 0.5, whose error is larger, so it has no gradient.
    torch.testing.assert_close(gradient(loss, values), column([-0.8, 0.0, 1.9, -0.9]))


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_estimators_by_finite_differences(kind: str) -> None:
    """Ratios are small and large, some beyond the bounds of the estimate and of the log-ratio."""
    reference = torch.zeros(6, dtype=torch.float64)
    policy = column([0.3, -0.4, 1.7, -2.0, -5.0, 25.0]).requires_grad_()
    assert gradcheck(lambda x: kl_penalty(x, reference, kind), policy)


def test_k3_gradient_vanishes_at_its_bounds() -> None:
    """It is 1 - exp(-d) inside, and 0 where the estimate or the log-ratio is bounded."""
    policy = column([0.3, -0.4, -5.0, 25.0]).requires_grad_()
    found = gradient(lambda x: kl_penalty(x, torch.zeros_like(x), "k3"), policy)
    expected = 1.0 - (-policy.detach()).exp()
    expected[2:] = 0.0
    torch.testing.assert_close(found, expected)


def test_llds_by_finite_differences() -> None:
    """With gates and tokens whose likelihood dropped or rose."""
    kept = torch.tensor([True, True, False, True, True, True, True, True])
    loss = lambda x: likelihood_loss(x, OLD, kept, torch.tensor(IDS))  # noqa: E731
    assert gradcheck(loss, log_probs())
    # Gates 0 and 3 dropped in sum; 1 and 2 rose, though some of their tokens dropped.
    torch.testing.assert_close(
        gradient(loss, log_probs()), column([0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregated_loss_by_finite_differences(aggregation: str) -> None:
    """Weights are constants; a token outside the mask has a gradient of exactly 0."""
    mask = torch.tensor([True, False, True, True, False, True, True, True])
    offsets = torch.tensor([0, 3, 5, 7, 8])
    weights = loss_weights(mask, offsets, aggregation, 4.0).double()
    loss = lambda x: weighted_sum(by_token("ppo")(x), weights)  # noqa: E731
    assert gradcheck(loss, log_probs())
    assert not gradient(loss, log_probs())[~mask].any()


def some_logits() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trainers_log_probs_and_entropy_by_finite_differences(temperature: float) -> None:
    """For a chunk of logits, from which the policy computes both."""
    assert gradcheck(lambda x: chunk_of_logits(x, [0, 5, 2, 2], temperature), some_logits())


def test_entropy_has_no_gradient_unless_requested() -> None:
    """An entropy that is only logged costs no backward."""
    _, entropy = chunk_of_logits(some_logits(), [0, 5, 2, 2], learn_entropy=False)
    assert not entropy.requires_grad
