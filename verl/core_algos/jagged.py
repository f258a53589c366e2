"""Sequences in flat tensors: each token's sequence, and sums, means and whitening over tokens."""

import torch
from torch import Tensor

ROUNDING = 1e-9
"""Scores that differ by less than this, absolutely or relatively, count as equal: the difference is
rounding, which an estimator that divides by a standard deviation would amplify."""


def sequence_ids(offsets: Tensor) -> Tensor:
    """Return for each token the index of its sequence, (num_tokens,) int64.

    Example: ``offsets = [0, 2, 2, 5]`` gives ``[0, 0, 2, 2, 2]``.
    """
    index = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(index, offsets.diff())


def segment_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """Sum ``x`` (num_tokens,) within each sequence; an empty one gives 0. Returns (num_seqs,)."""
    total = x.new_zeros(offsets.numel() - 1)
    return total.index_add(0, sequence_ids(offsets), x)


def sum_by_id(x: Tensor, ids: Tensor) -> Tensor:
    """Return each token's sum of ``x`` over all tokens with its id (int64 from 0, any order)."""
    num_ids = int(ids.max()) + 1 if ids.numel() else 0
    return x.new_zeros(num_ids).index_add(0, ids, x)[ids]


def last_policy_token(policy_mask: Tensor, offsets: Tensor) -> Tensor:
    """Return the flat index of each sequence's last policy token (num_seqs,), -1 without one."""
    positions = torch.arange(policy_mask.numel(), device=policy_mask.device)
    candidates = torch.where(policy_mask, positions, -1)
    last = torch.full((offsets.numel() - 1,), -1, device=policy_mask.device)
    return last.scatter_reduce(0, sequence_ids(offsets), candidates, reduce="amax")


def has_policy_token(policy_mask: Tensor, offsets: Tensor) -> Tensor:
    """Return which sequences have policy tokens and so are in the loss, (num_seqs,) bool."""
    return segment_sum(policy_mask.long(), offsets) > 0


def outcome_to_tokens(scores: Tensor, policy_mask: Tensor, offsets: Tensor) -> Tensor:
    """Place each sequence's score (num_seqs,) on its last policy token. Returns (num_tokens,)."""
    last = last_policy_token(policy_mask, offsets)
    present = last >= 0
    rewards = scores.new_zeros(policy_mask.numel())
    rewards[last[present]] = scores[present]
    return rewards


def difference(x: Tensor, y: Tensor) -> Tensor:
    """Return ``x - y``, but exactly 0 where they are equal up to ``ROUNDING``."""
    return torch.where(torch.isclose(x, y, rtol=ROUNDING, atol=ROUNDING), 0.0, x - y)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``x`` where ``mask`` is True, a scalar; 0 if it is True nowhere."""
    return x[mask].sum() / mask.sum().clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale ``x`` to mean 0 and unbiased variance 1 over ``mask``; 0 elsewhere.

    1e-8 is added to the variance before the root; a single masked element, and elements equal to
    the mean, become 0. Sums are in float64, the result has the dtype of ``x``.
    """
    chosen = x[mask].double()
    centred = difference(chosen, masked_mean(x.double(), mask))
    variance = centred.square().sum() / max(chosen.numel() - 1, 1)
    whitened = torch.zeros_like(x)
    whitened[mask] = (centred * torch.rsqrt(variance + 1e-8)).to(x.dtype)
    return whitened
