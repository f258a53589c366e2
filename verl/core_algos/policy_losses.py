"""Policy losses per token, and their registry.

All tensors here are (num_tokens,) over the tokens in the loss only, of whole sequences.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from verl.core_algos.jagged import sum_by_id

LOG_RATIO_LIMIT = 20.0
"""Bound on |log-ratio| before exponentiation, in nats: keeps float32 finite."""


@dataclass(frozen=True)
class PolicyLossInputs:
    """Inputs of a policy loss."""

    log_probs: Tensor
    """Log-probs of the policy being trained, with gradient."""
    old_log_probs: Tensor
    """Log-probs of the policy that sampled."""
    advantages: Tensor
    sequence_ids: Tensor
    """Index of each token's sequence, int64 from 0."""
    clip_low: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high] ..."""
    clip_high: float = 0.2
    """... a larger one is DAPO's clip-higher (Yu et al. 2025)."""
    clip_c: float = 3.0
    """Dual clip of ``ppo``: bound on the loss, in units of the advantage, where it is negative."""

    @property
    def log_ratio(self) -> Tensor:
        """log π - log π_old, in nats."""
        return self.log_probs - self.old_log_probs

    @property
    def ratio(self) -> Tensor:
        """π / π_old, its logarithm bounded."""
        return self.log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    def clip(self, ratio: Tensor) -> Tensor:
        """Clip a ratio to its range."""
        return ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)


@dataclass(frozen=True)
class PolicyDiagnostics:
    """Diagnostics of a policy loss per token, without gradient."""

    clipped: Tensor
    """1.0 where the clip of the ratio determined the loss."""
    dual_clipped: Tensor
    """1.0 where the dual clip determined the loss."""
    approx_kl: Tensor
    """old_log_probs - log_probs: its mean estimates KL(old || new), in nats."""


PolicyLoss = Callable[[PolicyLossInputs], tuple[Tensor, PolicyDiagnostics]]


def ppo(inputs: PolicyLossInputs) -> tuple[Tensor, PolicyDiagnostics]:
    """Clipped surrogate (Schulman et al. 2017) with dual clip (Ye et al. 2020).

    Where the advantage A is negative, the loss is at most ``-clip_c * A``. Raises ValueError
    when ``clip_c`` <= 1.
    """
    if inputs.clip_c <= 1.0:
        raise ValueError(
            f"got clip_c={inputs.clip_c}; the dual clip needs a bound above 1, such as 3.0"
        )
    losses, clipped = _clipped_surrogate(inputs, inputs.ratio)
    ceiling = -inputs.clip_c * inputs.advantages
    is_dual = (inputs.advantages < 0) & (losses > ceiling)
    return torch.where(is_dual, ceiling, losses), diagnose(inputs, clipped, is_dual)


def gspo(inputs: PolicyLossInputs) -> tuple[Tensor, PolicyDiagnostics]:
    """Clipped surrogate of the sequence's ratio (Zheng et al. 2025, eq. 5-7, token form).

    Each token's ratio is the geometric mean over its sequence, and passes the gradient to that
    token only. There is no dual clip. Published clips are about 3e-4; aggregate with
    ``seq-mean-token-mean``.
    """
    log_ratio = inputs.log_ratio
    ids = inputs.sequence_ids
    mean = sum_by_id(log_ratio.detach(), ids) / sum_by_id(torch.ones_like(log_ratio), ids)
    ratio = (mean + log_ratio - log_ratio.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    losses, clipped = _clipped_surrogate(inputs, ratio)
    return losses, diagnose(inputs, clipped)


def cispo(inputs: PolicyLossInputs) -> tuple[Tensor, PolicyDiagnostics]:
    """REINFORCE weighted by the clipped ratio, which has no gradient (MiniMax 2025, eq. 4)."""
    ratio = inputs.ratio.detach()
    weight = inputs.clip(ratio)
    losses = -weight * inputs.advantages * inputs.log_probs  # clipped tokens keep a gradient
    return losses, diagnose(inputs, clipped=weight != ratio)


def gpg(inputs: PolicyLossInputs) -> tuple[Tensor, PolicyDiagnostics]:
    """-A log π: no ratio, no clip (Chu et al. 2025)."""
    losses = -inputs.advantages * inputs.log_probs
    return losses, diagnose(inputs, clipped=torch.zeros_like(losses, dtype=torch.bool))


POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {"ppo": ppo, "gspo": gspo, "cispo": cispo, "gpg": gpg}
)
"""Losses by the name used in ``actor.policy_loss``."""


def likelihood_loss(
    log_probs: Tensor, old_log_probs: Tensor, preserved: Tensor, gate_ids: Tensor
) -> Tensor:
    """Penalise a drop in the likelihood of good tokens: LLDS (Deng et al. 2025, arXiv 2512.04220).

    ``preserved`` (bool) marks the tokens whose likelihood should not drop: those of trajectories
    with a non-negative advantage. ``gate_ids`` (int64 from 0) give each token's turn or trajectory.
    Where a gate's summed log-prob has dropped since sampling, each of its tokens that dropped costs
    ``old_log_probs - log_probs``; all others cost 0.
    """
    drop = torch.where(preserved, old_log_probs - log_probs, 0.0)
    total = sum_by_id(drop.detach(), gate_ids)
    return torch.where(total > 0, drop.clamp(min=0.0), 0.0)


def _clipped_surrogate(inputs: PolicyLossInputs, ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss max(-A ρ, -A clip(ρ)), and where the clip determined it (bool)."""
    plain = -inputs.advantages * ratio
    bounded = -inputs.advantages * inputs.clip(ratio)
    return torch.maximum(plain, bounded), bounded > plain


def diagnose(
    inputs: PolicyLossInputs, clipped: Tensor, dual_clipped: Tensor | None = None
) -> PolicyDiagnostics:
    """Return the diagnostics of a loss, from where clipping determined it (bool)."""
    dtype = inputs.log_probs.dtype
    dual = torch.zeros_like(clipped) if dual_clipped is None else dual_clipped
    return PolicyDiagnostics(clipped.to(dtype), dual.to(dtype), -inputs.log_ratio.detach())
