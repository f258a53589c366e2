"""Weights that make one figure of token losses, and the value loss."""

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
    policy_mask: Tensor,
    offsets: Tensor,
    aggregation: str,
    norm_length: float | None = None,
) -> Tensor:
    """Return weights (num_tokens,) float32 such that loss = Σ_t weight_t · loss_t.

    Compute them once over the whole mini-batch, over all ranks: then the sum over any split into
    micro-batches equals the unsplit loss. With N policy tokens, S sequences that have some, and L
    of them in the token's sequence, a policy token weighs: ``token-mean`` 1/N,
    ``seq-mean-token-sum`` 1/S, ``seq-mean-token-mean`` 1/(S·L), ``seq-mean-token-sum-norm``
    1/(S·norm_length). Other tokens weigh 0. Raises ValueError for another name, and where
    ``norm_length`` is needed and not a positive number of tokens.
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
    """Return Σ weight · loss, a scalar; a loss of weight 0 is not read, even if not finite."""
    return (torch.where(weights != 0, losses, 0.0) * weights).sum()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> Tensor:
    """Half the squared error, the larger of the plain and the clipped one, (num_tokens,).

    The clipped prediction stays within ``clip_range`` of ``old_values`` (PPO's reference code).
    """
    near = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())
