"""How far a step's updates moved the log-probs of its correct trajectories.

The earliest sign of collapse: the updates lower the likelihood of what was right (Deng et al. 2025,
arXiv 2512.04220), and only then do rollouts and scores get worse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl.core_algos.kl import kl_penalty
from verl.types import TokenBatch


def correct_sequences(scores: Tensor, limit: int) -> list[int]:
    """Indices of at most `limit` correct trajectories, evenly over the batch.

    Correct is a positive score of at least half the batch's best, `scores` (num_seqs,).
    """
    if not len(scores) or limit < 1:
        return []
    found = torch.nonzero((scores > 0) & (scores >= scores.max() / 2)).flatten().tolist()
    if len(found) <= limit:
        return found
    return [found[i * len(found) // limit] for i in range(limit)]


def correct_trajectories(batch: TokenBatch, limit: int) -> TokenBatch:
    """The correct trajectories to look at again, with the columns that a forward needs only."""
    chosen = batch.select(correct_sequences(batch.rows["scores"], limit))
    names = ("input_ids", "policy_mask", "rollout_log_probs")
    return TokenBatch(chosen.offsets, {name: chosen.tokens[name] for name in names})


def drift_and_shift(sampled: TokenBatch, log_probs: Tensor) -> tuple[float, float]:
    """How far the policy tokens' log-probs moved since the engine sampled them, in nats.

    `log_probs` (num_tokens,) are those of the policy after the updates. The drift is the mean of
    log π_after − log π_engine; the shift is KL(π_engine ‖ π_after) by k3, not negative: where some
    tokens gain what others lose, the drift is near 0 and the shift is not.
    """
    mask = sampled.tokens["policy_mask"]
    moved = (log_probs - sampled.tokens["rollout_log_probs"])[mask].double()
    shift = kl_penalty(-moved, torch.zeros_like(moved), "k3")
    return float(moved.mean()), float(shift.mean())
