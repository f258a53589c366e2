"""What follows from the engine's log-probs not being the trainer's: weights, masks, divergence.

Tensors are (num_tokens,) over the tokens of the loss, of whole sequences, and carry no gradient.
"""

import torch
from torch import Tensor

from verl.core_algos.jagged import sum_by_id
from verl.core_algos.policy_losses import LOG_RATIO_LIMIT

LEVELS = ("none", "token", "sequence")


def importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    sequence_ids: Tensor,
    level: str,
    threshold: float,
    mask_threshold: float | None = None,
) -> Tensor:
    """Truncated importance weights of trainer against engine (Yao et al. 2025).

    With level ``token`` the weight is π_old/π_rollout of the token, with ``sequence`` the product
    over the token's sequence, with ``none`` it is 1; it is cut at ``threshold``. Where that ratio,
    before the cut, is outside [1/mask_threshold, mask_threshold] the weight is 0. Raises
    ValueError for another level.
    """
    log_ratio = old_log_probs - rollout_log_probs
    match level:
        case "none":
            log_ratio = torch.zeros_like(log_ratio)
        case "token":
            pass
        case "sequence":
            log_ratio = sum_by_id(log_ratio, sequence_ids)
        case _:
            raise ValueError(f"got level {level!r}; expected one of {', '.join(LEVELS)}")
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weights = ratio.clamp(max=threshold)
    if mask_threshold is None:
        return weights
    is_near = (ratio <= mask_threshold) & (ratio >= 1.0 / mask_threshold)
    return torch.where(is_near, weights, 0.0)
