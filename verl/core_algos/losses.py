"""Losses of policy and critic by token, and the weights that make one figure of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.core_algos.jagged import segment_sum, sequence_ids

AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
LOG_RATIO_LIMIT = 20.0
"""Bound on |log-ratio| before exponentiation, in nats: keeps float32 finite."""


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


@dataclass(frozen=True)
class PolicyDiagnostics:
    """Per-token observations of the policy loss, without gradient, (num_tokens,) each."""

    clipped: Tensor
    """1.0 where the ratio's clip decided the loss."""
    dual_clipped: Tensor
    """1.0 where the dual clip decided the loss."""
    approx_kl: Tensor
    """old_log_probs - log_probs: its mean estimates KL(old || new), in nats."""


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float = 3.0,
) -> tuple[Tensor, PolicyDiagnostics]:
    """Clipped surrogate (Schulman et al. 2017) with dual clip (Ye et al. 2020), (num_tokens,).

    The ratio is clipped to [1 - clip_low, 1 + clip_high]; where the advantage A is negative the
    loss is at most ``-clip_c * A``. Weigh the losses with ``loss_weights`` and ``weighted_sum``.
    Raises ValueError when ``clip_c`` <= 1.
    """
    if clip_c <= 1.0:
        raise ValueError(f"got clip_c={clip_c}; the dual clip needs a bound above 1, such as 3.0")
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    clipped = torch.maximum(plain, bounded)
    ceiling = -clip_c * advantages
    is_negative = advantages < 0
    losses = torch.where(is_negative, torch.minimum(clipped, ceiling), clipped)
    diagnostics = PolicyDiagnostics(
        clipped=(bounded > plain).to(losses.dtype),
        dual_clipped=(is_negative & (clipped > ceiling)).to(losses.dtype),
        approx_kl=-log_ratio.detach(),
    )
    return losses, diagnostics


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_range: float) -> Tensor:
    """Half the squared error, the larger of the plain and the clipped one, (num_tokens,).

    The clipped prediction stays within ``clip_range`` of ``old_values`` (PPO's reference code).
    """
    near = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())


def _entropy_rows(logits: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
    # p log p -> 0 as p -> 0: a vocabulary entry that is masked out by -inf adds nothing.
    return -(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1)


def entropy_from_logits(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Entropy in nats of each row of (num_tokens, vocabulary) logits, (num_tokens,).

    Computed in float32 (float64 stays), ``chunk_size`` rows at a time; rows do not interact, so
    chunking changes no figure. Logits of -inf are allowed, except in a whole row.
    """
    return torch.cat([_entropy_rows(chunk) for chunk in torch.split(logits, chunk_size)])
