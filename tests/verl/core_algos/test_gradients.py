"""Gradients of every loss: by finite differences in double precision, away from kinks.

Where a loss stops a gradient on purpose, finite differences see the stopped part move and autograd
does not: `tests/core/core_algos/test_policy_losses.py` compares those with their formulas.
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
