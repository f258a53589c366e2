"""KL divergence to a reference: estimators, the penalty in the reward, and controllers."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl.core_algos.losses import loss_weights, weighted_sum
from verl.core_algos.policy_losses import LOG_RATIO_LIMIT

KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
LOW_VAR_KL_LIMIT = 10.0
"""Bound on one token's k3 estimate, in nats."""


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) from one sampled token each (Schulman 2020). Any shape.

    With ``d = log_probs - ref_log_probs``: ``kl``/``k1`` is d, ``abs`` is abs(d), ``mse``/``k2``
    is d²/2, ``low_var_kl``/``k3`` is exp(-d) + d - 1 with d limited to ±20 and the result to 10,
    as in veRL. Beyond a limit the gradient is 0. Raises ValueError for another kind.
    """
    difference = log_probs - ref_log_probs
    match kind:
        case "kl" | "k1":
            return difference
        case "abs":
            return difference.abs()
        case "mse" | "k2":
            return 0.5 * difference.square()
        case "low_var_kl" | "k3":
            bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            # expm1 keeps the estimate non-negative and accurate where the policies nearly agree.
            return (torch.expm1(-bounded) + bounded).clamp(max=LOW_VAR_KL_LIMIT)
        case _:
            raise ValueError(f"got KL estimator {kind!r}; expected one of {', '.join(KL_KINDS)}")


def apply_kl_in_reward(
    token_rewards: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    policy_mask: Tensor,
    coef: float,
    kind: str,
) -> Tensor:
    """Subtract ``coef * KL``, without gradient, from policy tokens' rewards. All (num_tokens,)."""
    penalty = kl_penalty(log_probs.detach(), ref_log_probs.detach(), kind)
    return token_rewards - coef * torch.where(policy_mask, penalty, 0.0)


def mean_sequence_kl(
    log_probs: Tensor, ref_log_probs: Tensor, policy_mask: Tensor, offsets: Tensor, kind: str
) -> Tensor:
    """Return the mean over sequences of the mean KL over policy tokens, as controllers need it."""
    weights = loss_weights(policy_mask, offsets, "seq-mean-token-mean")
    return weighted_sum(kl_penalty(log_probs.detach(), ref_log_probs.detach(), kind), weights)


class KLController(Protocol):
    """Holds the coefficient of the KL term."""

    value: float

    def next_value(self, current_kl: float, num_seqs: int) -> float:
        """Return the coefficient after a step whose KL (nats) over ``num_seqs`` is this."""


@dataclass
class FixedKLController:
    """A coefficient that never changes."""

    value: float

    def next_value(self, current_kl: float, num_seqs: int) -> float:
        """Return the coefficient."""
        return self.value


@dataclass
class AdaptiveKLController:
    """Steers KL towards a target by a clipped proportional rule (Ziegler et al. 2019, 2.2)."""

    value: float
    """Current coefficient: the only state that a checkpoint must keep."""
    target: float
    """Target KL in nats, > 0."""
    horizon: int = 10_000
    """Sequences over which a full correction of ±20 % is spread, > 0."""

    def __post_init__(self) -> None:
        """Raise ValueError for a target or horizon that is not positive: the rule divides by it."""
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(
                f"got target={self.target}, horizon={self.horizon}; both must be positive: set "
                "algorithm.kl_ctrl.target_kl"
            )

    def next_value(self, current_kl: float, num_seqs: int) -> float:
        """Return the coefficient times ``1 + clip(kl/target - 1, ±0.2) * num_seqs / horizon``."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        return self.value * (1.0 + error * num_seqs / self.horizon)
