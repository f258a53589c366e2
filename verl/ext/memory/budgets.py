"""Chooses the token budgets of micro-batches that are left to the machine.

A budget changes neither gradients nor metrics except for rounding, only memory and time. Small
micro-batches gather the weights more often and keep a card less busy; a rank computes one dialogue
at least, however small the budget is.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

from verl.config import Config
from verl.training.budgets import DEFAULT_TOKEN_BUDGET, actor_budgets, critic_budgets
from verl.training.roles import has_critic

ACTOR_BUDGET = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
CRITIC_BUDGET = "critic.ppo_max_token_len_per_gpu"
STEPS = 8
"""Number of budgets that are tried between the smallest and the wanted one."""


@dataclass(frozen=True)
class Budget:
    """A token budget that is null in the options, in tokens of one rank."""

    key: str
    wanted: int
    """What keeps a card busy, or less if the micro-batch size says so."""
    least: int
    """A rank's part of the longest dialogue."""

    @property
    def busy(self) -> int:
        """A budget that still keeps a card busy; less saves less time than offloading costs."""
        return max(self.least, self.wanted // 2)


def undecided_budgets(config: Config) -> list[Budget]:
    """Return the null budgets of the models that the run trains."""
    found = []
    if config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu is None:
        size = config.placement.actor.ranks_per_shard
        tokens = min(actor_budgets(config).update // size, DEFAULT_TOKEN_BUDGET)
        found.append(_budget(config, ACTOR_BUDGET, tokens, size))
    if has_critic(config) and config.critic.ppo_max_token_len_per_gpu is None:
        size = config.placement.critic.ranks_per_shard
        tokens = min(critic_budgets(config).update // size, 2 * DEFAULT_TOKEN_BUDGET)
        found.append(_budget(config, CRITIC_BUDGET, tokens, size))
    return found


def _budget(config: Config, key: str, tokens: int, ranks_per_shard: int) -> Budget:
    least = -(-config.data.max_model_len // ranks_per_shard)
    return Budget(key, max(least, tokens), least)


def with_budgets(config: Config, tokens: dict[str, int]) -> Config:
    """Return a copy with these budgets, by the names of their options."""
    result = copy.deepcopy(config)
    if ACTOR_BUDGET in tokens:
        result.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = tokens[ACTOR_BUDGET]
    if CRITIC_BUDGET in tokens:
        result.critic.ppo_max_token_len_per_gpu = tokens[CRITIC_BUDGET]
    return result


def enlarge(
    config: Config, budgets: list[Budget], start: dict[str, int], fits: Callable[[Config], bool]
) -> Config:
    """Return a copy with the largest budgets, from `start` up to the wanted ones, that fit.

    `fits` is true for `start`, and for everything smaller than what it is true for.
    """
    chosen = dict(start)
    for budget in budgets:
        low = start[budget.key]
        if low >= budget.wanted:
            continue
        sizes = [low + (budget.wanted - low) * step // STEPS for step in range(STEPS + 1)]
        first, last = 0, STEPS  # sizes[first] fits
        if fits(with_budgets(config, chosen | {budget.key: budget.wanted})):
            first = last
        while last - first > 1:
            middle = (first + last) // 2
            if fits(with_budgets(config, chosen | {budget.key: sizes[middle]})):
                first = middle
            else:
                last = middle
        chosen[budget.key] = sizes[first]
    return with_budgets(config, chosen)
