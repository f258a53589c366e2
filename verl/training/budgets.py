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
    """Return the policy's budgets: from token options, else the micro-batch size, else default."""
    actor = config.actor_rollout_ref.actor
    size = config.placement.actor.ranks_per_shard
    update = size * (actor.ppo_max_token_len_per_gpu or 0)
    groups = config.placement.actor.num_shards
    update = update or _micro_batch_tokens(config, actor.ppo_micro_batch_size, groups)
    update = update or size * DEFAULT_TOKEN_BUDGET
    return TokenBudgets(update, 2 * update)


def critic_budgets(config: Config) -> TokenBudgets:
    """Return the critic's budgets; by default twice the actor's per rank."""
    critic, size = config.critic, config.placement.critic.ranks_per_shard
    update = size * (critic.ppo_max_token_len_per_gpu or 0)
    groups = config.placement.critic.num_shards
    update = update or _micro_batch_tokens(config, critic.ppo_micro_batch_size, groups)
    actor_size = config.placement.actor.ranks_per_shard
    update = update or 2 * actor_budgets(config).update * size // actor_size
    return TokenBudgets(update, 2 * update)


def _micro_batch_tokens(config: Config, micro_batch_size: int | None, num_groups: int) -> int:
    """Return the most tokens that a group's share of a micro-batch has; 0 without that option."""
    if micro_batch_size is None:
        return 0
    return max(1, micro_batch_size // num_groups) * config.data.max_model_len
