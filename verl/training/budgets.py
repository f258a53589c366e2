"""How many tokens one packed forward of a rank may hold, from the options."""

from __future__ import annotations

from verl.config import Config
from verl.training.actor import DEFAULT_TOKEN_BUDGET, TokenBudgets


def actor_budgets(config: Config) -> TokenBudgets:
    """Token budgets of the policy, derived from trajectories per micro-batch where that is set."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    update = actor.ppo_max_token_len_per_gpu
    update = update or _budget(config, actor.ppo_micro_batch_size, config.num_ranks)
    update = update or DEFAULT_TOKEN_BUDGET
    return TokenBudgets(update, rollout.log_prob_max_token_len_per_gpu or 2 * update)


def critic_budgets(config: Config) -> TokenBudgets:
    """Token budgets of the critic; twice the actor's where nothing is set."""
    critic = config.critic
    update = critic.ppo_max_token_len_per_gpu
    update = update or _budget(config, critic.ppo_micro_batch_size, config.num_critic_ranks)
    update = update or 2 * actor_budgets(config).update
    return TokenBudgets(update, 2 * update)


def _budget(config: Config, micro_batch_size: int | None, num_ranks: int) -> int | None:
    if micro_batch_size is None:
        return None
    return max(1, micro_batch_size // num_ranks) * config.data.max_model_len
