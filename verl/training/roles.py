"""The models of a training rank: actor, reference and critic.

Here each role has a model of its own, and every weight of actor and critic is trained. Options that
ask for something else name another class in the place of `Roles` (`roles_class`).
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from verl import seams
from verl.config import Config
from verl.config.policy import BlocksConfig, FsdpConfig
from verl.core_algos.chosen import advantage_estimator
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.loading import copy_without_values, open_causal_lm
from verl.training.models import LogProbModel, ValueModel, blocks, recompute
from verl.training.weights import write_policy


def has_critic(config: Config) -> bool:
    """Return whether the ranks train a critic."""
    return advantage_estimator(config.algorithm.adv_estimator).needs_critic


@dataclass
class Roles:
    """Builds the models of a rank; all ranks of a group must make the same calls."""

    config: Config
    device: torch.device
    compute_dtype: torch.dtype
    num_loading: int
    """Ranks of the run on this node, which load their models at the same time."""
    total_updates: int
    """Optimizer steps of the actor in the run."""

    @property
    def has_critic(self) -> bool:
        """Whether the run has a critic."""
        return has_critic(self.config)

    def build_policy(self) -> tuple[FsdpModel, FsdpModel | None]:
        """Build the actor and, if it is needed, the reference: the policy before training."""
        section = self.config.actor_rollout_ref
        with self.open(section.model, section.model.path) as lm:
            # Copied before trained blocks are transformed.
            reference_lm = copy_without_values(lm) if self.config.needs_reference else None
            self.prepare(lm, section.model)
            actor = FsdpModel(LogProbModel(lm), blocks(lm, lm), self.device, self.actor_options())
        if reference_lm is None:
            return actor, None
        self.prepare(reference_lm)
        module, options = LogProbModel(reference_lm), self.reference_options()
        layers = blocks(reference_lm, reference_lm)
        return actor, FsdpModel(module, layers, self.device, options, copy_from=actor)

    def build_critic(self) -> FsdpModel:
        """Build the critic; on a rank with an actor, after `build_policy`."""
        model = self.config.critic.model
        with self.open(model, self.config.critic_path, needs_head=False) as lm:
            self.prepare(lm, model)
            module, options = ValueModel(lm), self.critic_options()
            return FsdpModel(module, blocks(module, lm), self.device, options, [module.value_head])

    def open(
        self, model: BlocksConfig, path: str, needs_head: bool = True
    ) -> AbstractContextManager[PreTrainedModel]:
        """Open the language model at `path`, to be sharded within the `with` block."""
        return open_causal_lm(path, self.dtype_of(model), self.num_loading, needs_head)

    def dtype_of(self, model: BlocksConfig) -> torch.dtype:
        """Return the dtype of a model's own weights: float32 if they are trained."""
        return torch.float32

    def prepare(self, lm: PreTrainedModel, trained: BlocksConfig | None = None) -> None:
        """Transform a model before it is sharded; `trained` are its options if it is trained."""
        if trained is not None:
            recompute(lm, trained.enable_gradient_checkpointing)

    def actor_options(self) -> FsdpOptions:
        """Return the options by which the actor is sharded and trained."""
        actor = self.config.actor_rollout_ref.actor
        return FsdpOptions(
            compute_dtype=self.compute_dtype,
            num_updates=self.total_updates,
            optim=actor.optim,
            grad_clip=actor.grad_clip,
            ranks_per_shard=self.config.placement.actor.ranks_per_shard,
            fsdp=actor.fsdp_config,
        )

    def reference_options(self) -> FsdpOptions:
        """Return the options by which the reference is sharded."""
        section = self.config.actor_rollout_ref
        return FsdpOptions(
            compute_dtype=self.compute_dtype,
            ranks_per_shard=self.config.placement.actor.ranks_per_shard,
            fsdp=FsdpConfig(section.ref.fsdp_config.param_offload, optimizer_offload=False),
        )

    def critic_options(self) -> FsdpOptions:
        """Return the options by which the critic is sharded and trained."""
        config, critic = self.config, self.config.critic
        size = critic.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
        steps = self.total_updates // max(config.updates_per_step, 1)  # without the warm-up
        return FsdpOptions(
            compute_dtype=self.compute_dtype,
            num_updates=steps * -(-config.num_trajectories // size) * critic.ppo_epochs,
            optim=critic.optim,
            grad_clip=critic.grad_clip,
            ranks_per_shard=config.placement.critic.ranks_per_shard,
            fsdp=critic.model.fsdp_config,
        )

    def write_for_engines(
        self, actor: FsdpModel, directory: Path, dtype: str, writer: int, num_writers: int
    ) -> float:
        """Write the folder that engines load; arguments and result are those of `write_policy`."""
        return write_policy(actor, directory, dtype, writer, num_writers)

    @classmethod
    def records(cls, config: Config) -> dict[str, Any]:
        """Return what checkpoints record of the models beside their tensors, by the model's name.

        They are computed without weights, before the ranks start. Raises ConfigError for options
        that do not fit a model.
        """
        return {}


def roles_class(config: Config) -> type[Roles]:
    """Return the class that builds the models of a run."""
    own: type[Roles] | None = seams.first(seams.ROLES, "roles_class", config)
    return own or Roles
