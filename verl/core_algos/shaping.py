"""Reward shaping: a penalty on over-long trajectories."""

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
