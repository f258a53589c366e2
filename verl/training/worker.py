"""Training ranks: of the actor, with reference and critic where needed, or of a critic alone.

Plain classes; the single controller runs them in Ray actors, tests in processes of their own. Every
rank of a group gets every call, with its shard of the batch.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from verl.config import AdapterConfig, Config, CriticModelConfig, ModelConfig
from verl.core_algos.advantages import ADVANTAGES
from verl.errors import ResourceError, explain
from verl.machine import HostMemory
from verl.remote_code import set_trust
from verl.training.actor import Actor
from verl.training.budgets import actor_budgets, critic_budgets
from verl.training.critic import Critic
from verl.training.devices import (
    PeakMemory,
    card_name,
    dtype_name,
    join_process_group,
    make_deterministic,
    pin_to_cores,
    resolve_device,
    resolve_dtype,
    share_threads,
    take_peak_memory,
)
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.kernels import prepare_blocks, use_kernels
from verl.training.loading import blank_copy, opened_causal_lm
from verl.training.lora import (
    Role,
    build_adapted_model,
    policy_adapter,
    policy_weights,
    share_base_model,
)
from verl.training.models import LogProbModel, ValueModel, blocks
from verl.training.network import interface_variables
from verl.training.node_folder import NodeFolder
from verl.training.sequence_parallel import SequenceParallelGroup, check_heads
from verl.training.shards import CRITIC_FOLDER, ShardWriter, load_shards, save_shards, shard_bytes
from verl.training.weight_broadcast import WeightBroadcast
from verl.training.weight_stream import TransferStats, device_key, send
from verl.training.weights import write_weights


class TrainingRank:
    """Rank `rank` of `world_size`; `total_steps` are the actor's optimizer steps in the run."""

    models: dict[str, FsdpModel]
    """The engines that learn, by the name they are saved under."""
    described: PretrainedConfig | None = None
    """The policy's config, kept in its checkpoints for those who load what is exported."""
    folder = ""
    """Where in a checkpoint this group's files lie."""
    critic: Critic | None = None
    is_critic_alone = False

    def __init__(
        self,
        config: Config,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        total_steps: int,
        num_colocated: int = 0,
    ) -> None:
        """`num_colocated`: ranks of the run's other group on this node."""
        set_trust(config.actor_rollout_ref.model.trust_remote_code)
        self.config, self.rank, self.world_size = config, rank, world_size
        self.total_steps = total_steps
        actors, critics = config.trainer.n_gpus_per_node, config.critic_gpus_per_node
        self.num_local = min(world_size, critics if self.is_critic_alone else actors)
        self.num_on_node = self.num_local + num_colocated
        self.device = resolve_device(config.trainer.device)
        self.dtype = resolve_dtype(config.trainer.compute_dtype, self.device)
        if self.device.type == "cpu":
            if config.is_split:
                pin_to_cores(config.trainer.rollout_gpus, is_engine=False)
            share_threads(self.num_local, num_colocated, comes_first=not self.is_critic_alone)
        if config.trainer.deterministic:
            make_deterministic()
        if max(config.trainer.nnodes, config.critic_nodes) > 1:
            os.environ |= {**interface_variables(master_addr), **os.environ}  # a user's stay
        os.environ |= {"MASTER_ADDR": master_addr, "MASTER_PORT": str(master_port)}
        join_process_group(self.device, rank, world_size)
        random.seed(config.trainer.seed)
        np.random.seed(config.trainer.seed)
        torch.manual_seed(config.trainer.seed)
        self._shard_writer = ShardWriter()
        self._sp_groups: dict[int, SequenceParallelGroup] = {}
        self.build()

    def build(self) -> None:
        """Make the models, and `models`."""
        raise NotImplementedError

    def sp_group(self, size: int) -> SequenceParallelGroup | None:
        """The `size` ranks that compute together with this one; every rank must ask. None for 1."""
        if size > 1 and size not in self._sp_groups:
            self._sp_groups[size] = SequenceParallelGroup.join(size)
        return self._sp_groups.get(size)

    def opened(
        self, model: ModelConfig | CriticModelConfig, path: str, needs_head: bool = True
    ) -> AbstractContextManager[PreTrainedModel]:
        """The language model at `path`, to be sharded inside of the `with`. What is trained is
        float32; below an adapter it is held as it computes."""
        dtype = self.dtype if model.has_adapter else torch.float32
        return opened_causal_lm(path, dtype, self.num_on_node, needs_head)

    def critic_options(self) -> FsdpOptions:
        """How the critic is held and learned."""
        config, critic = self.config, self.config.critic
        size = critic.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
        steps = self.total_steps // max(config.updates_per_step, 1)  # of the run, without warm-up
        return FsdpOptions(
            compute_dtype=self.dtype,
            num_updates=steps * -(-config.num_trajectories // size) * critic.ppo_epochs,
            optim=critic.optim,
            grad_clip=critic.grad_clip,
            sp_group=self.sp_group(config.critic_sp_size),
            fsdp=critic.model.fsdp_config,
        )

    def critic_engine(self) -> FsdpModel:
        """An engine of weights that are the critic's alone."""
        model = self.config.critic.model
        with self.opened(model, self.config.critic_path, needs_head=False) as lm:
            prepare_blocks(lm, model)
            check_heads(lm.config, self.config.critic_sp_size, "critic")
            options = self.critic_options()
            if model.has_adapter:
                return build_adapted_model(lm, {Role.CRITIC: model}, self.device, options)
            module = ValueModel(lm)
            return FsdpModel(module, blocks(module, lm), self.device, options, [module.value_head])

    def add_critic(self, engine: FsdpModel) -> None:
        """The value function in an engine."""
        self.critic = Critic(engine, self.config.critic, critic_budgets(self.config))
        self.models["critic"] = engine

    def save_checkpoint(self, directory: str | Path) -> str:
        """Write this rank's shards below `directory`, which the driver publishes when all did.
        Returns what went wrong, or an empty text."""
        return save_shards(Path(directory, self.folder), self.models, self.described)

    def start_checkpoint(self, directory: str | Path) -> None:
        """Copy this rank's shards, and write them below `directory` while training goes on."""
        self._shard_writer.start(Path(directory, self.folder), self.models, self.described)

    async def finish_checkpoint(self) -> str:
        """Wait for what `start_checkpoint` began; what went wrong, or an empty text."""
        return await asyncio.to_thread(self._shard_writer.finish)

    def checkpoint_memory(self) -> tuple[str, int, int]:
        """This host's name, the bytes of this rank's shards, and the host's free memory."""
        return socket.gethostname(), shard_bytes(self.models), HostMemory.now().free

    def load_checkpoint(self, directory: str | Path) -> None:
        """Take up the state saved in `directory`, by whatever ranks."""
        load_shards(Path(directory), self.models)

    def scale_lr(self, scale: float) -> None:
        """Learn at `scale` times the configured rates from the next update on."""
        for engine in self.models.values():
            engine.lr_scale = scale

    def empty_cache(self) -> None:
        """Give back the memory of the device that torch keeps for reuse."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def take_peak_memory(self) -> PeakMemory | None:
        """The most that this rank held of its device since the last call; None on CPU."""
        return take_peak_memory(self.device)

    def card_and_dtype(self) -> tuple[str, str]:
        """The name of this rank's card, empty on CPU, and of the dtype that it computes in."""
        return card_name(self.device), dtype_name(self.dtype)

    def shutdown(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


class TrainerWorker(TrainingRank):
    """A rank of the actor; with a critic too, unless that has devices of its own."""

    _folder: NodeFolder | None = None
    _broadcast: WeightBroadcast | None = None

    def build(self) -> None:
        """The actor, and what computes beside it. The reference is the policy before training:
        below an adapter it is there already, else it copies the actor's shards."""
        config, section = self.config, self.config.actor_rollout_ref
        needs_critic = ADVANTAGES[config.algorithm.adv_estimator].needs_critic
        self.has_critic = needs_critic and not config.has_own_critic
        needs_twin = config.needs_reference and not section.model.has_adapter
        with self.opened(section.model, section.model.path) as lm:
            self.model_config = self.described = lm.config
            twin = blank_copy(lm) if needs_twin else None
            prepare_blocks(lm, section.model)
            size = section.actor.ulysses_sequence_parallel_size
            check_heads(lm.config, size, "actor_rollout_ref.actor")
            engine = self._actor_engine(lm)
        self.actor, self.models = self._policy(engine), {"actor": engine}
        self.reference: Actor | None = None
        if config.needs_reference:
            self.reference = self._policy(self._reference_engine(engine, twin))
        if self.has_critic and config.shares_base:
            self.add_critic(share_base_model(engine, Role.CRITIC, self.critic_options()))
        elif self.has_critic:
            self.add_critic(self.critic_engine())

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
            sp_group=self.sp_group(section.actor.ulysses_sequence_parallel_size),
            fsdp=section.actor.fsdp_config,
        )
        if not section.model.has_adapter:
            return FsdpModel(LogProbModel(lm), blocks(lm, lm), self.device, options)
        adapters: dict[Role, AdapterConfig] = {Role.ACTOR: section.model}
        if self.has_critic and self.config.shares_base:
            adapters[Role.CRITIC] = self.config.critic.model
        return build_adapted_model(lm, adapters, self.device, options)

    def _reference_engine(self, actor: FsdpModel, twin: PreTrainedModel | None) -> FsdpModel:
        held, sp_group = self.config.actor_rollout_ref.ref.fsdp_config, actor.options.sp_group
        options = FsdpOptions(compute_dtype=self.dtype, sp_group=sp_group, fsdp=held)
        if twin is None:
            return share_base_model(actor, Role.REFERENCE, options)
        use_kernels(twin, self.config.actor_rollout_ref.model.kernels)
        module = LogProbModel(twin)
        return FsdpModel(module, blocks(twin, twin), self.device, options, twin=actor)

    def save_policy(
        self, directory: str | Path, dtype: str = "bfloat16", is_adapter: bool = False
    ) -> None:
        """Write the policy as a Hugging Face folder, once, with its adapter merged into it, or the
        adapter alone as peft's folder, where the first rank sees `directory`."""
        self._write_policy(Path(directory), dtype, is_adapter, writer=self.rank, num_writers=1)

    def share_policy(
        self, directory: str | Path, version: int, needed: Sequence[int], dtype: str,
        is_adapter: bool,
    ) -> float:  # fmt: skip
        """As `save_policy`, but into a folder of each node's memory, by all of its ranks together:
        a folder for `version`, beside which only the `needed` ones stay. Returns the seconds in
        which this rank wrote."""
        writer = self.rank % self.num_local
        if writer == 0:
            self._folder = self._folder or NodeFolder(Path(directory))
            self._folder.keep({str(one) for one in needed})
        dist.barrier()  # the folder is there
        folder = Path(directory, str(version))
        return self._write_policy(folder, dtype, is_adapter, writer, self.num_local)

    def device_key(self) -> str:
        """The device of this rank, as engines' workers there call it."""
        return device_key(self.device)

    def open_broadcast(self, host: str, num_receivers: int) -> str:
        """Let workers of engines on other devices join; returns the name of the stream."""
        sends_changes = self.config.actor_rollout_ref.rollout.weight_delta
        self._broadcast = WeightBroadcast(host, num_receivers, self.device, sends_changes)
        return self._broadcast.stream

    def send_policy(self, num_receivers: int, stream: str, dtype: str) -> TransferStats:
        """Send the policy, with its adapter merged into it, to engines' workers: those on this
        device, or all that have joined the stream that this rank opened."""
        named, target = policy_weights(self.actor.model, dtype), getattr(torch, dtype)
        if self._broadcast is not None and self._broadcast.stream == stream:
            sent = self._broadcast.send(named, target)
        else:
            sent = send(named, stream, self.device, num_receivers, target)
        dist.barrier()
        return sent

    def _write_policy(
        self, directory: Path, dtype: str, is_adapter: bool, writer: int, num_writers: int
    ) -> float:
        """Every rank gives its shards; the first writers write them. Returns their seconds. Raises
        ResourceError where it cannot write, when the others have all."""
        seconds = 0.0
        problem: OSError | None = None
        named: Iterator[tuple[str, Tensor]] = iter(())
        try:
            if is_adapter:
                adapter = policy_adapter(self.actor.model)
                start = time.perf_counter()
                if writer == 0:
                    adapter.write(directory)
                seconds = time.perf_counter() - start
            else:
                named = policy_weights(self.actor.model, dtype)
                if writer < num_writers:
                    parts = (writer, num_writers)
                    seconds = write_weights(directory, named, self.model_config, dtype, *parts)
        except OSError as error:
            problem = error
        for _ in named:  # each tensor is gathered by all ranks together
            pass
        dist.barrier()
        if problem is not None:
            expected = "a folder that takes the weights"
            raise ResourceError(
                explain(str(directory), problem, expected, "make room")
            ) from problem
        return seconds

    def shutdown(self) -> None:
        """Leave the process group, and take the weights out of the node's memory."""
        if self._folder is not None:
            self._folder.close()
        super().shutdown()


class CriticWorker(TrainingRank):
    """A rank of a critic on devices of its own (`critic.n_gpus_per_node`)."""

    folder = CRITIC_FOLDER
    is_critic_alone = True

    def build(self) -> None:
        """The critic alone."""
        self.models = {}
        self.add_critic(self.critic_engine())
