"""Advantages, losses and KL estimators as pure functions of jagged tensors.

No configuration, no Ray and no I/O live here. Conventions that hold throughout:

* A batch is flat. A token tensor has shape ``(num_tokens,)``; ``offsets``, int64 of shape
  ``(num_seqs + 1,)``, delimits sequences: sequence ``i`` is ``x[offsets[i]:offsets[i + 1]]``.
* ``policy_mask``, bool of shape ``(num_tokens,)``, is True exactly at tokens that the policy
  sampled; prompt and observation tokens are False.
* Every per-token column is aligned with the token it concerns: ``log_probs[t]`` is the log-prob of
  token ``t`` given its prefix, ``values[t]`` the value of the state before token ``t``,
  ``rewards[t]`` the reward received for token ``t``.
* A sequence without policy tokens is left out: it has no advantage, carries no loss weight and is
  no member of its group.
* The tensors of one call are on one device.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)

LOG_RATIO_LIMIT = 20.0
"""Bound on |log-ratio| before exponentiation, in nats: keeps float32 finite."""
LOW_VAR_KL_LIMIT = 10.0
"""Bound on one token's k3 estimate, in nats."""
STD_EPSILON = 1e-6
"""Added to a group's standard deviation."""


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


def last_policy_token(policy_mask: Tensor, offsets: Tensor) -> Tensor:
    """Return the flat index of each sequence's last policy token, -1 without one. (num_seqs,)"""
    positions = torch.arange(policy_mask.numel(), device=policy_mask.device)
    candidates = torch.where(policy_mask, positions, -1)
    last = torch.full((offsets.numel() - 1,), -1, device=policy_mask.device)
    return last.scatter_reduce(0, sequence_ids(offsets), candidates, reduce="amax")


def has_policy_token(policy_mask: Tensor, offsets: Tensor) -> Tensor:
    """Tell which sequences take part in the loss, (num_seqs,) bool."""
    return segment_sum(policy_mask.long(), offsets) > 0


def outcome_to_tokens(scores: Tensor, policy_mask: Tensor, offsets: Tensor) -> Tensor:
    """Place each sequence's score (num_seqs,) on its last policy token. Returns (num_tokens,)."""
    last = last_policy_token(policy_mask, offsets)
    present = last >= 0
    rewards = scores.new_zeros(policy_mask.numel())
    rewards[last[present]] = scores[present]
    return rewards


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``x`` where ``mask`` is True, a scalar; 0 when it is True nowhere."""
    return x[mask].sum() / mask.sum().clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale ``x`` to mean 0 and unbiased variance 1 over ``mask``; 0 elsewhere.

    The variance gets 1e-8 added before the root; a single masked element becomes 0.
    """
    chosen = x[mask]
    centred = chosen - masked_mean(x, mask)
    variance = centred.square().sum() / max(chosen.numel() - 1, 1)
    whitened = torch.zeros_like(x)
    whitened[mask] = centred * torch.rsqrt(variance + 1e-8)
    return whitened


def _policy_grid(policy_mask: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return (row, column) of each policy token in the grid of sequences without other tokens.

    Both have shape (num_policy_tokens,), in the tokens' flat order; rows are sequences.
    """
    rows = sequence_ids(offsets)[policy_mask]
    lengths = segment_sum(policy_mask.long(), offsets)
    starts = lengths.cumsum(0) - lengths
    columns = torch.arange(rows.numel(), device=rows.device) - starts[rows]
    return rows, columns


def compute_gae_advantage(
    rewards: Tensor,
    values: Tensor,
    policy_mask: Tensor,
    offsets: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over policy tokens only (Schulman et al. 2016).

    The recursion runs on each sequence with its other tokens removed, so an observation costs no
    extra ``gamma * lam`` and its values and rewards are never read. The value after the last
    policy token is 0. Returns advantages and returns, (num_tokens,) each, 0 off the policy.

    Example: tokens ``p p o o p`` are treated as ``p p p``.
    """
    rows, columns = _policy_grid(policy_mask, offsets)
    width = int(columns.max()) + 1 if columns.numel() else 0
    # One spare column holds the value 0 after each sequence's end.
    value_grid = values.new_zeros(offsets.numel() - 1, width + 1)
    value_grid[rows, columns] = values[policy_mask]
    reward_grid = values.new_zeros(offsets.numel() - 1, width)
    reward_grid[rows, columns] = rewards[policy_mask].to(values.dtype)

    deltas = reward_grid + gamma * value_grid[:, 1:] - value_grid[:, :-1]
    running = values.new_zeros(offsets.numel() - 1)
    advantage_grid = torch.zeros_like(deltas)
    for column in reversed(range(width)):
        running = deltas[:, column] + gamma * lam * running
        advantage_grid[:, column] = running

    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[policy_mask] = advantage_grid[rows, columns]
    returns[policy_mask] = (advantage_grid + value_grid[:, :-1])[rows, columns]
    return advantages, returns


def dense_group_ids(group_ids: Sequence[Hashable] | Tensor, device: torch.device) -> Tensor:
    """Number groups 0, 1, … in order of first appearance, (num_seqs,) int64.

    Ids are compared by equality, so that ``("nq", 3)`` and ``("hotpotqa", 3)`` differ.
    """
    keys = group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids
    numbers: dict[Hashable, int] = {}
    dense = [numbers.setdefault(key, len(numbers)) for key in keys]
    return torch.tensor(dense, dtype=torch.int64, device=device)


def group_statistics(scores: Tensor, groups: Tensor, members: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sequence's group mean and unbiased standard deviation, (num_seqs,) each.

    ``groups`` are dense ids; only sequences where ``members`` (num_seqs,) is True count. A group
    of fewer than two members has mean 0 and deviation 1, as in veRL: its score passes unchanged.
    """
    num_groups = int(groups.max()) + 1 if groups.numel() else 0

    def total(x: Tensor) -> Tensor:
        return x.new_zeros(num_groups).index_add(0, groups[members], x[members])

    counts = total(torch.ones_like(scores))
    means = total(scores) / counts.clamp(min=1)
    squares = total((scores - means[groups]).square())
    stds = (squares / (counts - 1).clamp(min=1)).sqrt()
    is_comparable = counts > 1
    means = torch.where(is_comparable, means, 0.0)
    stds = torch.where(is_comparable, stds, 1.0)
    return means[groups], stds[groups]


def compute_grpo_advantage(
    scores: Tensor,
    group_ids: Sequence[Hashable] | Tensor,
    policy_mask: Tensor,
    offsets: Tensor,
    norm_by_std: bool = True,
) -> Tensor:
    """Score relative to its group, on each policy token (Shao et al. 2024, eq. 3).

    ``(score - mean) / (std + 1e-6)``, without the division when ``norm_by_std`` is False.
    ``scores`` and ``group_ids`` have one entry a sequence. Returns (num_tokens,), 0 off the policy.
    Raises ValueError when their lengths differ.
    """
    if len(group_ids) != scores.numel():
        raise ValueError(
            f"got {len(group_ids)} group ids for {scores.numel()} scores; give one id a sequence"
        )
    groups = dense_group_ids(group_ids, scores.device)
    members = has_policy_token(policy_mask, offsets)
    means, stds = group_statistics(scores, groups, members)
    advantages = scores - means
    if norm_by_std:
        advantages = advantages / (stds + STD_EPSILON)
    return torch.where(policy_mask, advantages[sequence_ids(offsets)], 0.0)


@dataclass(frozen=True)
class AdvantageInputs:
    """All that an advantage estimator may read; what it does not need may be None."""

    token_rewards: Tensor
    """Outcome, and KL penalty where it is in the reward, (num_tokens,)."""
    policy_mask: Tensor
    """(num_tokens,) bool."""
    offsets: Tensor
    """(num_seqs + 1,) int64."""
    values: Tensor | None = None
    """Critic's values, (num_tokens,)."""
    group_ids: Sequence[Hashable] | Tensor | None = None
    """The prompt instance of each sequence, (num_seqs,): include the data source."""
    gamma: float = 1.0
    """Discount a policy token."""
    lam: float = 1.0
    """GAE's lambda."""
    norm_by_std: bool = True
    """Divide group advantages by the group's standard deviation."""

    @property
    def scores(self) -> Tensor:
        """Sum of rewards over each sequence's policy tokens, (num_seqs,)."""
        return segment_sum(torch.where(self.policy_mask, self.token_rewards, 0.0), self.offsets)


@dataclass(frozen=True)
class Advantages:
    """What an estimator gives: both (num_tokens,), 0 off the policy."""

    advantages: Tensor
    returns: Tensor
    """The critic's target; equal to ``advantages`` where there is no critic."""


@dataclass(frozen=True)
class AdvantageEstimator:
    """One algorithm: what it needs, and how it is computed."""

    name: str
    needs_critic: bool
    needs_groups: bool
    compute: Callable[[AdvantageInputs], Advantages]


def _gae(inputs: AdvantageInputs) -> Advantages:
    assert inputs.values is not None, "gae needs values; run the critic before the advantages"
    advantages, returns = compute_gae_advantage(
        inputs.token_rewards,
        inputs.values,
        inputs.policy_mask,
        inputs.offsets,
        inputs.gamma,
        inputs.lam,
    )
    return Advantages(masked_whiten(advantages, inputs.policy_mask), returns)


def _grpo(inputs: AdvantageInputs) -> Advantages:
    assert inputs.group_ids is not None, "grpo needs group_ids; give each sequence its prompt's id"
    advantages = compute_grpo_advantage(
        inputs.scores, inputs.group_ids, inputs.policy_mask, inputs.offsets, inputs.norm_by_std
    )
    return Advantages(advantages, advantages)


ADVANTAGES: Mapping[str, AdvantageEstimator] = MappingProxyType(
    {
        row.name: row
        for row in (
            AdvantageEstimator("gae", needs_critic=True, needs_groups=False, compute=_gae),
            AdvantageEstimator("grpo", needs_critic=False, needs_groups=True, compute=_grpo),
        )
    }
)
"""Estimators by the name used in ``algorithm.adv_estimator``; a new algorithm is a new row."""


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) from one sampled token each (Schulman 2020). Any shape.

    With ``d = log_probs - ref_log_probs``: ``kl``/``k1`` is d, ``abs`` is abs(d), ``mse``/``k2``
    is d²/2, ``low_var_kl``/``k3`` is exp(-d) + d - 1 with d limited to ±20 and the result to 10,
    as in veRL. Beyond a limit the gradient is 0. Raises ValueError for another kind.
    """
    difference = log_probs - ref_log_probs
    match kind:
        case "kl" | "k1":
            return difference
        case "abs":
            return difference.abs()
        case "mse" | "k2":
            return 0.5 * difference.square()
        case "low_var_kl" | "k3":
            bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            # expm1 keeps the estimate non-negative and accurate where the policies nearly agree.
            return (torch.expm1(-bounded) + bounded).clamp(max=LOW_VAR_KL_LIMIT)
        case _:
            raise ValueError(f"got KL estimator {kind!r}; expected one of {', '.join(KL_KINDS)}")


def apply_kl_in_reward(
    token_rewards: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    policy_mask: Tensor,
    coef: float,
    kind: str,
) -> Tensor:
    """Subtract ``coef * KL`` from the reward of each policy token. All (num_tokens,); no gradient.

    Rewards off the policy stay as they are.
    """
    penalty = kl_penalty(log_probs.detach(), ref_log_probs.detach(), kind)
    return token_rewards - coef * torch.where(policy_mask, penalty, 0.0)


def mean_sequence_kl(
    log_probs: Tensor, ref_log_probs: Tensor, policy_mask: Tensor, offsets: Tensor, kind: str
) -> Tensor:
    """Mean over sequences of the mean KL over policy tokens, a scalar that controllers follow."""
    weights = loss_weights(policy_mask, offsets, "seq-mean-token-mean")
    return weighted_sum(kl_penalty(log_probs.detach(), ref_log_probs.detach(), kind), weights)


class KLController(Protocol):
    """Holds the coefficient of the KL term; ``update`` is called once a step."""

    value: float

    def update(self, current_kl: float, num_seqs: int) -> None:
        """Adapt ``value`` to the KL (nats) measured over ``num_seqs`` sequences."""


@dataclass
class FixedKLController:
    """A coefficient that never changes."""

    value: float

    def update(self, current_kl: float, num_seqs: int) -> None:
        """Do nothing."""


@dataclass
class AdaptiveKLController:
    """Steers KL towards a target by a clipped proportional rule (Ziegler et al. 2019, 2.2)."""

    value: float
    """Present coefficient: all the state that a checkpoint must keep."""
    target: float
    """Wanted KL in nats, > 0."""
    horizon: int
    """Sequences over which a full correction of ±20 % is spread, > 0."""

    def __post_init__(self) -> None:
        """Refuse a target or horizon that the rule would divide by in vain."""
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(
                f"got target={self.target}, horizon={self.horizon}; both must be positive: set "
                "algorithm.kl_ctrl.target_kl and algorithm.kl_ctrl.horizon"
            )

    def update(self, current_kl: float, num_seqs: int) -> None:
        """Multiply the coefficient by ``1 + clip(kl/target - 1, ±0.2) * num_seqs / horizon``."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * num_seqs / self.horizon


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
