"""From rewards to advantages: estimators, and the registry that names them."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from verl.core_algos.jagged import has_policy_token, masked_whiten, segment_sum, sequence_ids

STD_EPSILON = 1e-6
"""Added to a group's standard deviation."""


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
