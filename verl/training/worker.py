"""One training rank: actor, and reference and critic where the algorithm needs them.

A plain class; the single controller runs it in a Ray actor, tests in a process of their own.
Every rank gets every call, with its shard of the batch.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from verl.config import AdapterConfig, Config, CriticModelConfig, FsdpConfig, ModelConfig
from verl.core_algos.advantages import ADVANTAGES
from verl.machine import HostMemory
from verl.remote_code import set_trust
from verl.training.actor import DEFAULT_TOKEN_BUDGET, Actor, TokenBudgets
from verl.training.critic import Critic
from verl.training.devices import (
    PeakMemory,
    card_name,
    dtype_name,
    join_process_group,
    keep_to_cores,
    make_deterministic,
    resolve_device,
    resolve_dtype,
    share_threads,
    take_peak_memory,
)
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.loading import blank_copy, opened_causal_lm
from verl.training.lora import Role, adapted_engine, policy_adapter, policy_weights, share
from verl.training.models import LogProbModel, ValueModel, blocks
from verl.training.network import interface_variables
from verl.training.node_folder import NodeFolder
from verl.training.shards import ShardWriter, load_shards, num_bytes, save_shards
from verl.training.weights import write_weights


def actor_budgets(config: Config) -> TokenBudgets:
    """Token budgets of the policy, derived from trajectories per micro-batch where that is set."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    update = actor.ppo_max_token_len_per_gpu or _budget(config, actor.ppo_micro_batch_size)
    update = update or DEFAULT_TOKEN_BUDGET
    return TokenBudgets(update, rollout.log_prob_max_token_len_per_gpu or 2 * update)


def critic_budgets(config: Config) -> TokenBudgets:
    """Token budgets of the critic; twice the actor's where nothing is set."""
    critic = config.critic
    update = critic.ppo_max_token_len_per_gpu or _budget(config, critic.ppo_micro_batch_size)
    update = update or 2 * actor_budgets(config).update
    return TokenBudgets(update, 2 * update)


def _budget(config: Config, micro_batch_size: int | None) -> int | None:
    if micro_batch_size is None:
        return None
    return max(1, micro_batch_size // config.num_ranks) * config.data.max_model_len


def critic_updates(config: Config, actor_updates: int) -> int:
    """Optimizer steps of the critic in a run whose actor makes `actor_updates` without warm-up."""
    size = config.critic.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
    steps = actor_updates // max(config.updates_per_step, 1)
    return steps * -(-config.num_trajectories // size) * config.critic.ppo_epochs


def recompute_activations(lm: PreTrainedModel, config: ModelConfig | CriticModelConfig) -> None:
    """Let `lm` recompute activations in backward, if so configured."""
    if config.enable_gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})


def offloading(options: FsdpConfig) -> dict[str, Any]:
    """What waits on the host; the driver has decided it for all ranks."""
    param, optimizer = options.param_offload, options.optimizer_offload
    assert param is not None and optimizer is not None, "null is decided before ranks start"
    return {"param_offload": param, "optimizer_offload": optimizer}


class TrainerWorker:
    """Rank `rank` of `world_size`; `total_steps` are the actor's optimizer steps in the run."""

    def __init__(
        self,
        config: Config,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        total_steps: int,
    ) -> None:
        set_trust(config.actor_rollout_ref.model.trust_remote_code)
        self.config, self.rank, self.world_size = config, rank, world_size
        self.total_steps = total_steps
        self._folder: NodeFolder | None = None
        self.device = resolve_device(config.trainer.device)
        self.dtype = resolve_dtype(config.trainer.compute_dtype, self.device)
        if self.device.type == "cpu":
            if config.is_split:
                keep_to_cores(config.trainer.rollout_gpus, is_engine=False)
            share_threads(min(world_size, config.trainer.n_gpus_per_node))
        if config.trainer.deterministic:
            make_deterministic()
        if config.trainer.nnodes > 1:
            os.environ |= {**interface_variables(master_addr), **os.environ}  # a user's stay
        os.environ |= {"MASTER_ADDR": master_addr, "MASTER_PORT": str(master_port)}
        join_process_group(self.device, rank, world_size)
        random.seed(config.trainer.seed)
        np.random.seed(config.trainer.seed)
        torch.manual_seed(config.trainer.seed)
        self.needs_critic = ADVANTAGES[config.algorithm.adv_estimator].needs_critic
        self.actor, self.reference = self._build_policy()
        self.critic = self._build_critic() if self.needs_critic else None
        self._shard_writer = ShardWriter()

    def _opened(
        self, model: ModelConfig | CriticModelConfig, path: str, needs_head: bool = True
    ) -> AbstractContextManager[PreTrainedModel]:
        """The language model at `path`, to be sharded inside of the `with`.

        What is trained is float32; below an adapter it is held as it computes.
        """
        dtype = self.dtype if model.has_adapter else torch.float32
        return opened_causal_lm(path, dtype, self.config.trainer.n_gpus_per_node, needs_head)

    def _build_policy(self) -> tuple[Actor, Actor | None]:
        """The actor, and the reference where one is needed: the policy before training.

        Below an adapter the reference is there already; else it copies the actor's shards.
        """
        section = self.config.actor_rollout_ref
        needs_twin = self.config.needs_reference and not section.model.has_adapter
        with self._opened(section.model, section.model.path) as lm:
            self.model_config = lm.config
            twin = blank_copy(lm) if needs_twin else None
            recompute_activations(lm, section.model)
            actor = self._actor_engine(lm)
        reference = None
        if self.config.needs_reference:
            reference = self._policy(self._reference_engine(actor, twin))
        return self._policy(actor), reference

    def _policy(self, engine: FsdpModel) -> Actor:
        section = self.config.actor_rollout_ref
        temperature = section.rollout.temperature or 1.0  # greedy rollouts are judged at 1
        return Actor(engine, section.actor, actor_budgets(self.config), temperature)

    def _actor_engine(self, lm: PreTrainedModel) -> FsdpModel:
        section = self.config.actor_rollout_ref
        options = FsdpOptions(
            compute_dtype=self.dtype,
            num_updates=self.total_steps,
            optim=section.actor.optim,
            grad_clip=section.actor.grad_clip,
            **offloading(section.actor.fsdp_config),
        )
        if not section.model.has_adapter:
            return FsdpModel(LogProbModel(lm), blocks(lm, lm), self.device, options)
        adapters: dict[Role, AdapterConfig] = {Role.ACTOR: section.model}
        if self.needs_critic and self.config.shares_base:
            adapters[Role.CRITIC] = self.config.critic.model
        return adapted_engine(lm, adapters, self.device, options)

    def _reference_engine(self, actor: FsdpModel, twin: PreTrainedModel | None) -> FsdpModel:
        fsdp = self.config.actor_rollout_ref.ref.fsdp_config
        options = FsdpOptions(compute_dtype=self.dtype, **offloading(fsdp))
        if twin is None:
            return share(actor, Role.REFERENCE, options)
        module = LogProbModel(twin)
        return FsdpModel(module, blocks(twin, twin), self.device, options, twin=actor)

    def _build_critic(self) -> Critic:
        critic = self.config.critic
        options = FsdpOptions(
            compute_dtype=self.dtype,
            num_updates=critic_updates(self.config, self.total_steps),
            optim=critic.optim,
            grad_clip=critic.grad_clip,
            **offloading(critic.model.fsdp_config),
        )
        if self.config.shares_base:
            engine = share(self.actor.engine, Role.CRITIC, options)
        else:
            with self._opened(critic.model, self.config.critic_path, needs_head=False) as lm:
                recompute_activations(lm, critic.model)
                engine = self._critic_engine(lm, options)
        return Critic(engine, critic, critic_budgets(self.config))

    def _critic_engine(self, lm: PreTrainedModel, options: FsdpOptions) -> FsdpModel:
        """A critic with weights of its own."""
        if self.config.critic.model.has_adapter:
            adapters: dict[Role, AdapterConfig] = {Role.CRITIC: self.config.critic.model}
            return adapted_engine(lm, adapters, self.device, options)
        module = ValueModel(lm)
        return FsdpModel(
            module, blocks(module, lm), self.device, options, float32_modules=[module.value_head]
        )

    def save_policy(
        self, directory: str | Path, dtype: str = "bfloat16", is_adapter: bool = False
    ) -> None:
        """Write the policy as a Hugging Face folder, once, with its adapter merged into it.

        With `is_adapter`, write the adapter alone as peft's folder. `directory` is on a file system
        that the first rank sees.
        """
        self._write_policy(Path(directory), dtype, is_adapter, writer=self.rank, num_writers=1)

    def share_policy(
        self, directory: str | Path, version: int, needed: Sequence[int], dtype: str,
        is_adapter: bool,
    ) -> float:  # fmt: skip
        """As `save_policy`, but into a folder of each node's memory that goes with its rank.

        There `version` gets a folder of its own, and of those before only the `needed` ones stay.
        All ranks of a node write, each its part. Returns the seconds in which this one did.
        """
        num_writers = self.config.trainer.n_gpus_per_node
        writer = self.rank % num_writers
        if writer == 0:
            self._folder = self._folder or NodeFolder(Path(directory))
            self._folder.keep({str(one) for one in needed})
        dist.barrier()  # the folder is there
        folder = Path(directory, str(version))
        return self._write_policy(folder, dtype, is_adapter, writer, num_writers)

    def _write_policy(
        self, directory: Path, dtype: str, is_adapter: bool, writer: int, num_writers: int
    ) -> float:
        """Every rank gives its shards; the first writers write them. Returns their seconds."""
        seconds = 0.0
        if is_adapter:
            adapter = policy_adapter(self.actor.engine)
            if writer == 0:
                start = time.perf_counter()
                adapter.write(directory)
                seconds = time.perf_counter() - start
        else:
            named = policy_weights(self.actor.engine, dtype)
            if writer < num_writers:
                parts = (writer, num_writers)
                seconds = write_weights(directory, named, self.model_config, dtype, *parts)
            else:
                for _ in named:  # each tensor is gathered by all ranks together
                    pass
        dist.barrier()
        return seconds

    @property
    def engines(self) -> dict[str, FsdpModel]:
        """The engines that learn, by the name they are saved under."""
        found = {"actor": self.actor.engine}
        return found if self.critic is None else {**found, "critic": self.critic.engine}

    def save_checkpoint(self, directory: str | Path) -> str:
        """Write this rank's shards below `directory`, which the driver publishes when all did.

        Returns what went wrong, or an empty text.
        """
        return save_shards(Path(directory), self.engines, self.model_config)

    def start_checkpoint(self, directory: str | Path) -> None:
        """Copy this rank's shards, and write them below `directory` while training goes on."""
        self._shard_writer.start(Path(directory), self.engines, self.model_config)

    async def finish_checkpoint(self) -> str:
        """Wait for what `start_checkpoint` began; what went wrong, or an empty text."""
        return await asyncio.to_thread(self._shard_writer.finish)

    def checkpoint_room(self) -> tuple[str, int, int]:
        """This host's name, the bytes of this rank's shards, and the host's free memory."""
        return socket.gethostname(), num_bytes(self.engines), HostMemory.now().free

    def load_checkpoint(self, directory: str | Path) -> None:
        """Take up the state saved in `directory`, by whatever number of ranks."""
        load_shards(Path(directory), self.engines)

    def scale_lr(self, scale: float) -> None:
        """Learn at `scale` times the configured rates from the next update on."""
        for engine in self.engines.values():
            engine.lr_scale = scale

    def empty_cache(self) -> None:
        """Give back the memory of the device that torch keeps for reuse."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def take_peak_memory(self) -> PeakMemory | None:
        """The most that this rank held of its device since the last call; None on CPU."""
        return take_peak_memory(self.device)

    def card(self) -> tuple[str, str]:
        """The name of this rank's card, empty on CPU, and of the dtype that it computes in."""
        return card_name(self.device), dtype_name(self.dtype)

    def shutdown(self) -> None:
        """Leave the process group, and take the weights out of the node's memory."""
        if self._folder is not None:
            self._folder.close()
        dist.destroy_process_group()
