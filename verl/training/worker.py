"""Training ranks, which hold the models of one role or of several.

These are plain classes, which the single controller runs in Ray actors and tests in subprocesses.
All ranks of a group get the same calls, each with its shard of the batch.
"""

import asyncio
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from verl.config import Config
from verl.machine import HostMemory
from verl.plugins import optional
from verl.remote_code import set_trust
from verl.training.actor import Actor
from verl.training.budgets import actor_budgets, critic_budgets
from verl.training.critic import Critic
from verl.training.devices import (
    PeakMemory,
    join_process_group,
    make_deterministic,
    resolve_device,
    resolve_dtype,
    take_peak_memory,
)
from verl.training.fsdp import FsdpModel
from verl.training.roles import roles_class
from verl.training.shards import ShardWriter, load_shards, save_shards, shard_bytes
from verl.training.weights import policy_config, write_policy
from verl.weights.files import selected_transport


class TrainerWorker:
    """A rank of the actor, with reference and critic where needed, or of a critic alone."""

    models: dict[str, FsdpModel]
    """The trained models, by the names under which they are saved."""
    reference: Actor | None = None
    saved_config: PretrainedConfig | None = None
    """The policy's config, which checkpoints contain for the export of the model."""
    critic: Critic | None = None

    def __init__(
        self, config: Config, rank: int, world_size: int, master_addr: str, master_port: int,
        total_steps: int, num_others: int = 0, group: str | None = None,
    ) -> None:  # fmt: skip
        """Join the process group as rank `rank` of `world_size` and build the models.

        `total_steps` are the actor's optimizer steps in the run, `num_others` the ranks of other
        groups on this node. `group` is the rank's own in `Config.placement`; default: the actor's.
        """
        set_trust(config.actor_rollout_ref.model.trust_remote_code)
        self.config, self.rank, self.world_size = config, rank, world_size
        plan = config.placement
        group = group or plan.actor.group
        self.held = plan.roles_of(group)
        self.checkpoint_subfolder = "" if group == plan.actor.group else self.held[0]
        self.num_local = min(world_size, plan.groups[group].per_node)
        self.device = resolve_device(config.trainer.device)
        self.dtype = resolve_dtype(config.trainer.compute_dtype, self.device)
        cores = optional("verl.ext.cpu.cores")
        if cores is not None:
            cores.prepare_rank(config, self.num_local, num_others, "actor" in self.held)
        if config.trainer.deterministic:
            make_deterministic()
        os.environ |= {"MASTER_ADDR": master_addr, "MASTER_PORT": str(master_port)}
        join_process_group(self.device, rank, world_size, plan.patience_s)
        random.seed(config.trainer.seed)
        np.random.seed(config.trainer.seed)
        torch.manual_seed(config.trainer.seed)
        self._shard_writer = ShardWriter()
        self.roles = roles_class(config)(
            config, self.device, self.dtype, self.num_local + num_others, total_steps
        )
        self.build()

    def build(self) -> None:
        """Build the models of the roles that the rank holds, as far as the options need them."""
        self.models = {}
        if "actor" in self.held:
            self.add_policy(*self.roles.build_policy())
        if "critic" in self.held and self.roles.has_critic:
            model = self.models["critic"] = self.roles.build_critic()
            self.critic = Critic(model, self.config.critic, critic_budgets(self.config))

    def add_policy(self, actor: FsdpModel, reference: FsdpModel | None) -> None:
        """Make these this rank's policy, and the policy before training."""
        self.actor, self.models["actor"] = self._policy(actor), actor
        self.sender = selected_transport(self.config).sender(self)
        self.reference = None if reference is None else self._policy(reference)
        self.saved_config = policy_config(actor)

    def _policy(self, model: FsdpModel) -> Actor:
        section = self.config.actor_rollout_ref
        temperature = section.rollout.log_prob_temperature
        return Actor(model, section.actor, actor_budgets(self.config), temperature)

    def save_checkpoint(self, directory: str | Path) -> str:
        """Write this rank's shards into `directory`; return the error, or an empty string."""
        # The driver publishes the checkpoint once all ranks have written theirs.
        folder = Path(directory, self.checkpoint_subfolder)
        return save_shards(folder, self.models, self.saved_config)

    def start_checkpoint(self, directory: str | Path) -> None:
        """Copy this rank's shards and write them into `directory` while training continues."""
        folder = Path(directory, self.checkpoint_subfolder)
        self._shard_writer.start(folder, self.models, self.saved_config)

    async def finish_checkpoint(self) -> str:
        """Wait for the write of `start_checkpoint`; return its error, or an empty string."""
        return await asyncio.to_thread(self._shard_writer.finish)

    def checkpoint_memory(self) -> tuple[str, int, int]:
        """Return the host's name, the bytes of this rank's shards, and the host's free memory."""
        return socket.gethostname(), shard_bytes(self.models), HostMemory.now().free

    def load_checkpoint(self, directory: str | Path) -> None:
        """Load the state saved in `directory`, by any number of ranks."""
        load_shards(Path(directory), self.models)

    def empty_cache(self) -> None:
        """Release the device memory that torch has cached."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def take_peak_memory(self) -> PeakMemory | None:
        """Return this rank's peak of device memory since the last call; None on CPU."""
        return take_peak_memory(self.device)

    def save_policy(self, directory: str | Path, dtype: str) -> None:
        """Write the policy into `directory` as a Hugging Face folder, on the first rank's node."""
        write_policy(self.actor.model, Path(directory), dtype, writer=self.rank, num_writers=1)

    def policy_weights(self, dtype: str) -> Iterator[tuple[str, Tensor]]:
        """As `FsdpModel.policy_weights`."""
        return self.actor.model.policy_weights(dtype)

    def write_policy(self, directory: Path, dtype: str, writer: int, num_writers: int) -> float:
        """As `Roles.write_for_engines`."""
        return self.roles.write_for_engines(self.actor.model, directory, dtype, writer, num_writers)

    def shutdown(self) -> None:
        """Remove what was sent and leave the process group."""
        if "actor" in self.held:
            self.sender.close()
        dist.destroy_process_group()
