"""Advantage estimators, and their registry."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from verl.core_algos.groups import Groups
from verl.core_algos.jagged import (
    difference,
    has_policy_token,
    masked_mean,
    masked_whiten,
    segment_sum,
    sequence_ids,
)

STD_EPSILON = 1e-6
"""Added to a group's standard deviation."""


def _policy_grid(policy_mask: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each policy token's sequence and its index among that sequence's policy tokens."""
    rows = sequence_ids(offsets)[policy_mask]
    lengths = segment_sum(policy_mask.long(), offsets)
    starts = lengths.cumsum(0) - lengths
    columns = torch.arange(rows.numel(), device=rows.device) - starts[rows]
    return rows, columns


def compute_gae_advantage(
    rewards: Tensor, values: Tensor, policy_mask: Tensor, offsets: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over policy tokens only (Schulman et al. 2016).

    The recursion runs on each sequence with all other tokens removed, so an observation adds no
    factor ``gamma * lam``, and its values and rewards are never read. The value after the last
    policy token is 0. Returns advantages and returns, (num_tokens,) each, 0 at other tokens.

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


def discounted_returns(
    rewards: Tensor, policy_mask: Tensor, offsets: Tensor, gamma: float
) -> Tensor:
    """Return each policy token's return, discounted per policy token; 0 elsewhere (num_tokens,)."""
    values = torch.zeros_like(rewards)  # GAE with these and lambda 1 gives the returns
    return compute_gae_advantage(rewards, values, policy_mask, offsets, gamma, 1.0)[0]


def per_token(per_sequence: Tensor, policy_mask: Tensor, offsets: Tensor) -> Tensor:
    """Copy each sequence's value (num_seqs,) to its policy tokens, 0 elsewhere: (num_tokens,)."""
    return torch.where(policy_mask, per_sequence[sequence_ids(offsets)], 0.0)


# Scores are float64: the rounding of float32 sums would be up to a tenth of STD_EPSILON.


def grpo(scores: Tensor, groups: Groups, norm_by_std: bool = True) -> Tensor:
    """Return each score relative to its group, (num_seqs,) (Shao et al. 2024, eq. 3).

    ``(score - mean) / (std + 1e-6)``; without the division (``norm_by_std`` False) it is the
    advantage of Dr.GRPO (Liu et al. 2025).
    """
    centred = difference(scores, groups.mean(scores))
    return centred / (groups.std(scores) + STD_EPSILON) if norm_by_std else centred


def rloo(scores: Tensor, groups: Groups) -> Tensor:
    """Return each score less the mean of its group's others, (num_seqs,) (Ahmadian et al. 2024)."""
    sizes = groups.sizes(scores)
    return difference(scores, groups.mean(scores)) * (sizes / (sizes - 1).clamp(min=1))


def opo(scores: Tensor, groups: Groups, lengths: Tensor) -> Tensor:
    """Return each score less its group's mean weighted by length, (num_seqs,) (Hao et al. 2025).

    ``lengths`` count policy tokens. This baseline minimises the variance if the gradients of all
    tokens have about the same norm.
    """
    return difference(scores, groups.mean(scores, lengths))


def grpo_passk(scores: Tensor, groups: Groups, norm_by_std: bool = True) -> Tensor:
    """Return advantages for pass@n of a group, (num_seqs,) (Tang et al. 2025, arXiv 2503.19595).

    ``max - second max`` for the best score, and 0 for all others and where two scores are best;
    divided as in ``grpo``.
    """
    lead = difference(scores, groups.best_of_others(scores))
    lead = torch.where(groups.sizes(scores) > 1, lead.clamp(min=0.0), lead)
    return lead / (groups.std(scores) + STD_EPSILON) if norm_by_std else lead


@dataclass(frozen=True)
class Gae:
    """What GAE needs besides a discount."""

    lam: float = 1.0
    """Its lambda."""
    mask: Tensor | None = None
    """Tokens that it runs over and computes returns for, (num_tokens,); None: policy tokens."""
    whiten_mask: Tensor | None = None
    """Tokens over which its advantages are whitened, (num_tokens,); None: policy tokens."""


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage estimator; those that it does not need may be None."""

    token_rewards: Tensor
    """Outcome reward, with the KL penalty where it is in the reward, (num_tokens,)."""
    policy_mask: Tensor
    """(num_tokens,) bool."""
    offsets: Tensor
    """(num_seqs + 1,) int64."""
    values: Tensor | None = None
    """The critic's values, (num_tokens,)."""
    group_ids: Sequence[Hashable] | Tensor | None = None
    """Id of each sequence's prompt, (num_seqs,); must be unique across data sources."""
    gamma: float = 1.0
    """Discount factor per policy token."""
    norm_by_std: bool = True
    """Divide group advantages by the group's standard deviation (grpo, grpo_passk)."""
    gae: Gae = Gae()

    @property
    def scores(self) -> Tensor:
        """Sum of rewards over each sequence's policy tokens, (num_seqs,) float64."""
        rewards = torch.where(self.policy_mask, self.token_rewards, 0.0)
        return segment_sum(rewards.double(), self.offsets)

    @property
    def groups(self) -> Groups:
        """The groups of ``group_ids``; raises ValueError unless there is one id per sequence."""
        assert self.group_ids is not None, "give each sequence its prompt's id as group_ids"
        return Groups.of(self.group_ids, self.policy_mask, self.offsets)

    @property
    def lengths(self) -> Tensor:
        """Policy tokens of each sequence, (num_seqs,) float64."""
        return segment_sum(self.policy_mask.double(), self.offsets)

    def returns_to_go(self) -> Tensor:
        """Return the discounted rewards from each policy token on, (num_tokens,) float64."""
        rewards = self.token_rewards.double()
        returns = discounted_returns(rewards, self.policy_mask, self.offsets, self.gamma)
        return difference(returns, torch.zeros_like(returns))

    def per_token(self, per_sequence: Tensor) -> Tensor:
        """Copy each sequence's value (num_seqs,) to its policy tokens, (num_tokens,)."""
        return per_token(per_sequence, self.policy_mask, self.offsets)

    def whiten(self, advantages: Tensor) -> Tensor:
        """Whiten advantages over the policy tokens of the batch, (num_tokens,)."""
        return masked_whiten(advantages, self.policy_mask)


@dataclass(frozen=True)
class Advantages:
    """Result of an estimator, (num_tokens,) each: 0 off the policy (returns: off ``gae.mask``)."""

    advantages: Tensor
    returns: Tensor
    """The critic's target; equal to ``advantages`` where there is no critic."""


@dataclass(frozen=True)
class AdvantageEstimator:
    """An advantage estimator and its requirements."""

    name: str
    """Value of ``algorithm.adv_estimator``."""
    compute: Callable[[AdvantageInputs], Advantages]
    needs_critic: bool = False
    """Whether it reads ``values``."""
    needs_groups: bool = False
    """Whether it compares the trajectories of a prompt, of which there must be several."""


def _gae(inputs: AdvantageInputs) -> Advantages:
    assert inputs.values is not None, "gae needs values; run the critic before the advantages"
    policy, gae = inputs.policy_mask, inputs.gae
    steps = policy if gae.mask is None else gae.mask
    advantages, returns = compute_gae_advantage(
        inputs.token_rewards, inputs.values, steps, inputs.offsets, inputs.gamma, gae.lam
    )
    whitened = masked_whiten(advantages, policy if gae.whiten_mask is None else gae.whiten_mask)
    return Advantages(torch.where(policy, whitened, 0.0), returns)


def _reinforce_baseline(inputs: AdvantageInputs) -> Tensor:
    members = has_policy_token(inputs.policy_mask, inputs.offsets)
    baseline = masked_mean(inputs.scores, members).expand_as(inputs.scores)
    return difference(inputs.returns_to_go(), inputs.per_token(baseline))


Estimate = Callable[[AdvantageInputs], Tensor]


def critic_free(name: str, estimate: Estimate, **needs: bool) -> AdvantageEstimator:
    """Build an estimator whose ``estimate`` (num_tokens,) is both advantage and return."""

    def compute(inputs: AdvantageInputs) -> Advantages:
        advantages = estimate(inputs).to(inputs.token_rewards.dtype)
        return Advantages(advantages, advantages)

    return AdvantageEstimator(name, compute, **needs)


def group_based(name: str, estimate: Estimate) -> AdvantageEstimator:
    """Build an estimator that compares groups, from an ``estimate`` per sequence (num_seqs,)."""
    return critic_free(name, lambda x: x.per_token(estimate(x)), needs_groups=True)


_ESTIMATORS = (
    AdvantageEstimator("gae", _gae, needs_critic=True),
    group_based("grpo", lambda x: grpo(x.scores, x.groups, x.norm_by_std)),
    group_based("dr_grpo", lambda x: grpo(x.scores, x.groups, norm_by_std=False)),
    group_based("rloo", lambda x: rloo(x.scores, x.groups)),
    group_based("opo", lambda x: opo(x.scores, x.groups, x.lengths)),
    group_based("grpo_passk", lambda x: grpo_passk(x.scores, x.groups, x.norm_by_std)),
    critic_free("reinforce", lambda x: x.returns_to_go()),
    critic_free("reinforce_baseline", _reinforce_baseline),
    critic_free("reinforce_plus_plus", lambda x: x.whiten(x.returns_to_go())),
    critic_free(
        "reinforce_plus_plus_baseline",
        lambda x: x.whiten(x.per_token(grpo(x.scores, x.groups, norm_by_std=False))),
        needs_groups=True,
    ),
)

DIVIDED = ("grpo", "grpo_passk")
"""Estimators that divide by the deviation of a group, if ``norm_by_std``."""
ADVANTAGES: Mapping[str, AdvantageEstimator] = MappingProxyType({e.name: e for e in _ESTIMATORS})
"""Estimators by their names in ``algorithm.adv_estimator``; a new algorithm is a new entry."""
