"""Corrections for the mismatch between the engine's log-probs and the trainer's.

Tensors are (num_tokens,) over the tokens in the loss, of whole sequences, and have no gradient.
"""

import torch
from torch import Tensor

from verl.core_algos.jagged import sum_by_id
from verl.core_algos.policy_losses import LOG_RATIO_LIMIT

LEVELS = ("none", "token", "sequence", "geometric")


def probability_ratios(
    old_log_probs: Tensor, rollout_log_probs: Tensor, sequence_ids: Tensor, level: str
) -> Tensor:
    """Return π_old/π_rollout for each token, its logarithm bounded.

    Level ``token`` is the token's own ratio, ``sequence`` the product over its sequence,
    ``geometric`` the geometric mean over its sequence, and ``none`` 1. Raises ValueError for
    another level.
    """
    log_ratio = old_log_probs - rollout_log_probs
    match level:
        case "none":
            log_ratio = torch.zeros_like(log_ratio)
        case "token":
            pass
        case "sequence":
            log_ratio = sum_by_id(log_ratio, sequence_ids)
        case "geometric":
            lengths = sum_by_id(torch.ones_like(log_ratio), sequence_ids)
            log_ratio = sum_by_id(log_ratio, sequence_ids) / lengths
        case _:
            raise ValueError(f"got level {level!r}; expected one of {', '.join(LEVELS)}")
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    sequence_ids: Tensor,
    level: str,
    threshold: float,
    mask_threshold: float | None = None,
    *,
    mask_level: str | None = None,
    mask_floor: float | None = None,
) -> Tensor:
    """Return weights that correct a loss for tokens sampled by another policy; 0 drops a token.

    The ratio of ``level`` is cut off at ``threshold`` (truncated importance sampling, Yao et al.
    2025). Where the unclipped ratio of ``mask_level`` (None: ``level``) is
    outside [mask_floor, mask_threshold], the weight is 0; ``mask_floor`` None means
    1/mask_threshold. So a token mask with narrow bounds is IcePop, a sequence mask MIS, and
    ``geometric`` within [0.99, 1.01] masks by the mean log-ratio.
    """
    pair = old_log_probs, rollout_log_probs
    ratios = probability_ratios(*pair, sequence_ids, level)
    weights = ratios.clamp(max=threshold)
    if mask_threshold is None:
        return weights
    if mask_level not in (None, level):
        ratios = probability_ratios(*pair, sequence_ids, mask_level)
    low = 1.0 / mask_threshold if mask_floor is None else mask_floor
    return torch.where((ratios <= mask_threshold) & (ratios >= low), weights, 0.0)
