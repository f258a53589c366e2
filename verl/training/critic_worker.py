"""A critic with weights of its own, beside the actor on its ranks or on ranks of its own."""

from __future__ import annotations

from transformers import PreTrainedModel

from verl.config import AdapterConfig, Config
from verl.training.budgets import critic_budgets
from verl.training.crews import check_heads
from verl.training.critic import Critic
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.kernels import prepare_blocks
from verl.training.lora import Role, adapted_engine
from verl.training.models import ValueModel, blocks
from verl.training.rank import TrainingRank, offloading
from verl.training.shards import CRITIC_FOLDER


def critic_updates(config: Config, actor_updates: int) -> int:
    """Optimizer steps of the critic in a run whose actor makes `actor_updates` without warm-up."""
    size = config.critic.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
    steps = actor_updates // max(config.updates_per_step, 1)
    return steps * -(-config.num_trajectories // size) * config.critic.ppo_epochs


def critic_options(rank: TrainingRank) -> FsdpOptions:
    """How the critic is held and learned."""
    critic = rank.config.critic
    return FsdpOptions(
        compute_dtype=rank.dtype,
        num_updates=critic_updates(rank.config, rank.total_steps),
        optim=critic.optim,
        grad_clip=critic.grad_clip,
        crew=rank.crew(rank.config.critic_crew_size),
        **offloading(critic.model.fsdp_config),
    )


def critic_of(rank: TrainingRank, engine: FsdpModel) -> Critic:
    """The value function in an engine."""
    return Critic(engine, rank.config.critic, critic_budgets(rank.config))


def own_engine(rank: TrainingRank) -> FsdpModel:
    """An engine of weights that are the critic's alone."""
    model = rank.config.critic.model
    with rank.opened(model, rank.config.critic_path, needs_head=False) as lm:
        prepare_blocks(lm, model)
        check_heads(lm.config, rank.config.critic_crew_size, "critic")
        return _engine(rank, lm, critic_options(rank))


def _engine(rank: TrainingRank, lm: PreTrainedModel, options: FsdpOptions) -> FsdpModel:
    if rank.config.critic.model.has_adapter:
        adapters: dict[Role, AdapterConfig] = {Role.CRITIC: rank.config.critic.model}
        return adapted_engine(lm, adapters, rank.device, options)
    module = ValueModel(lm)
    return FsdpModel(
        module, blocks(module, lm), rank.device, options, float32_modules=[module.value_head]
    )


class CriticWorker(TrainingRank):
    """A rank of a critic on devices of its own (`critic.n_gpus_per_node`)."""

    folder = CRITIC_FOLDER
    is_critic_alone = True

    def build(self) -> None:
        """The critic alone."""
        engine = own_engine(self)
        self.critic, self.engines = critic_of(self, engine), {"critic": engine}
