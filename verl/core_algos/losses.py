"""Weights that aggregate token losses, and the value loss."""

import torch
from torch import Tensor

from verl.core_algos.jagged import segment_sum, sequence_ids

AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def loss_weights(
    policy_mask: Tensor, offsets: Tensor, aggregation: str, norm_length: float | None = None
) -> Tensor:
    """Return weights (num_tokens,) float32 such that loss = Σ_t weight_t · loss_t.

    Compute them once for the whole mini-batch, over all ranks: then the sum over any split into
    micro-batches equals the unsplit loss. With N policy tokens, S sequences that have any, and L
    policy tokens in a token's sequence, the weight of a policy token is 1/N for ``token-mean``, 1/S
    for ``seq-mean-token-sum``, 1/(S·L) for ``seq-mean-token-mean``, and 1/(S·norm_length) for
    ``seq-mean-token-sum-norm``. Other tokens have weight 0. Raises ValueError for another name, and
    if ``norm_length`` is needed but not positive.
    """
    lengths = segment_sum(policy_mask.double(), offsets)
    num_seqs = (lengths > 0).sum().clamp(min=1)
    match aggregation:
        case "token-mean":
            per_sequence = torch.ones_like(lengths) / lengths.sum().clamp(min=1)
        case "seq-mean-token-sum":
            per_sequence = torch.ones_like(lengths) / num_seqs
        case "seq-mean-token-mean":
            per_sequence = 1.0 / (num_seqs * lengths.clamp(min=1))
        case "seq-mean-token-sum-norm":
            if norm_length is None or norm_length <= 0:
                raise ValueError(
                    f"got norm_length={norm_length}; {aggregation} needs a positive number of "
                    "tokens: give the longest response allowed"
                )
            per_sequence = torch.ones_like(lengths) / (num_seqs * norm_length)
        case _:
            known = ", ".join(AGGREGATIONS)
            raise ValueError(f"got aggregation {aggregation!r}; expected one of {known}")
    return torch.where(policy_mask, per_sequence[sequence_ids(offsets)], 0.0).float()


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Return Σ weight · loss, a scalar; losses of weight 0 are ignored, even if not finite."""
    return (torch.where(weights != 0, losses, 0.0) * weights).sum()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> Tensor:
    """Return half the squared error, plain or clipped, whichever is larger: (num_tokens,).

    The clipped prediction stays within ``clip_range`` of ``old_values`` (PPO's reference code).
    """
    near = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())
