"""Reward and advantage shaping: a penalty on over-long trajectories, a bound on advantages."""

from torch import Tensor


def overlong_penalty(
    lengths: Tensor, max_length: int, buffer_length: int, penalty_factor: float
) -> Tensor:
    """Return each trajectory's penalty (DAPO's soft punishment, Yu et al. 2025, eq. 13).

    ``lengths`` (num_seqs,) count policy tokens. The penalty is 0 up to
    ``max_length - buffer_length``, rises linearly over the buffer, and is ``penalty_factor`` from
    ``max_length`` on. Returns (num_seqs,) float64, never negative.
    """
    excess = lengths.double() - (max_length - buffer_length)
    return penalty_factor * (excess / buffer_length).clamp(0.0, 1.0)


def clip_advantages(
    advantages: Tensor, policy_mask: Tensor, bound: float | None
) -> tuple[Tensor, Tensor]:
    """Clip advantages (num_tokens,) to ±``bound``; also return the share of policy tokens cut.

    None for `bound` clips nothing.
    """
    if bound is None:
        return advantages, advantages.new_zeros(())
    is_cut = (advantages.abs() > bound) & policy_mask
    share = is_cut.sum() / policy_mask.sum().clamp(min=1)
    return advantages.clamp(-bound, bound), share.to(advantages.dtype)
