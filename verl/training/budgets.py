"""Token budgets of one packed forward of the ranks that compute it, derived from the options."""

from dataclasses import dataclass

from verl.config import Config

DEFAULT_TOKEN_BUDGET = 16384


@dataclass(frozen=True)
class TokenBudgets:
    """Tokens of one packed forward of the ranks that compute it together, by default one."""

    update: int = DEFAULT_TOKEN_BUDGET
    inference: int = 2 * DEFAULT_TOKEN_BUDGET


def actor_budgets(config: Config) -> TokenBudgets:
    """Return the policy's budgets: from the option, else by default."""
    actor = config.actor_rollout_ref.actor
    size = config.placement.actor.ranks_per_shard
    update = size * (actor.ppo_max_token_len_per_gpu or 0)
    update = update or size * DEFAULT_TOKEN_BUDGET
    return TokenBudgets(update, 2 * update)


def critic_budgets(config: Config) -> TokenBudgets:
    """Return the critic's budgets; by default twice the actor's per rank."""
    critic, size = config.critic, config.placement.critic.ranks_per_shard
    update = size * (critic.ppo_max_token_len_per_gpu or 0)
    update = update or 2 * actor_budgets(config).update
    return TokenBudgets(update, 2 * update)
