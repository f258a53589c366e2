"""What every training rank has, whatever models it holds: its process, its shards, its clocks.

A plain class; the single controller runs it in a Ray actor, tests in a process of their own. Every
rank of a group gets every call, with its shard of the batch. `worker` and `critic` build models.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel

from verl.config import Config, CriticModelConfig, ModelConfig
from verl.machine import HostMemory
from verl.remote_code import set_trust
from verl.training.crews import Crew
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
from verl.training.fsdp import FsdpModel
from verl.training.loading import opened_causal_lm
from verl.training.network import interface_variables
from verl.training.shards import ShardWriter, load_shards, num_bytes, save_shards


class TrainingRank:
    """Rank `rank` of `world_size`; `total_steps` are the actor's optimizer steps in the run."""

    engines: dict[str, FsdpModel]
    """The engines that learn, by the name they are saved under."""
    described: PretrainedConfig | None = None
    """The policy's config, kept in its checkpoints for those who load what is exported."""
    folder = ""
    """Where in a checkpoint this group's files lie."""
    is_critic_alone = False

    def __init__(
        self,
        config: Config,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        total_steps: int,
        num_beside: int = 0,
    ) -> None:
        """`num_beside`: ranks of the run's other group on this node."""
        set_trust(config.actor_rollout_ref.model.trust_remote_code)
        self.config, self.rank, self.world_size = config, rank, world_size
        self.total_steps = total_steps
        actors, critics = config.trainer.n_gpus_per_node, config.critic_gpus_per_node
        self.num_local = min(world_size, critics if self.is_critic_alone else actors)
        self.num_on_node = self.num_local + num_beside
        self.device = resolve_device(config.trainer.device)
        self.dtype = resolve_dtype(config.trainer.compute_dtype, self.device)
        if self.device.type == "cpu":
            if config.is_split:
                keep_to_cores(config.trainer.rollout_gpus, is_engine=False)
            share_threads(self.num_local, num_beside, comes_first=not self.is_critic_alone)
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
        self._crews: dict[int, Crew] = {}
        self.build()

    def build(self) -> None:
        """Make the models, and `engines`."""
        raise NotImplementedError

    def crew(self, size: int) -> Crew | None:
        """The `size` ranks that compute together with this one; every rank must ask. None for 1."""
        if size > 1 and size not in self._crews:
            self._crews[size] = Crew.join(size)
        return self._crews.get(size)

    def opened(
        self, model: ModelConfig | CriticModelConfig, path: str, needs_head: bool = True
    ) -> AbstractContextManager[PreTrainedModel]:
        """The language model at `path`, to be sharded inside of the `with`. What is trained is
        float32; below an adapter it is held as it computes."""
        dtype = self.dtype if model.has_adapter else torch.float32
        return opened_causal_lm(path, dtype, self.num_on_node, needs_head)

    def save_checkpoint(self, directory: str | Path) -> str:
        """Write this rank's shards below `directory`, which the driver publishes when all did.
        Returns what went wrong, or an empty text."""
        return save_shards(Path(directory, self.folder), self.engines, self.described)

    def start_checkpoint(self, directory: str | Path) -> None:
        """Copy this rank's shards, and write them below `directory` while training goes on."""
        self._shard_writer.start(Path(directory, self.folder), self.engines, self.described)

    async def finish_checkpoint(self) -> str:
        """Wait for what `start_checkpoint` began; what went wrong, or an empty text."""
        return await asyncio.to_thread(self._shard_writer.finish)

    def checkpoint_room(self) -> tuple[str, int, int]:
        """This host's name, the bytes of this rank's shards, and the host's free memory."""
        return socket.gethostname(), num_bytes(self.engines), HostMemory.now().free

    def load_checkpoint(self, directory: str | Path) -> None:
        """Take up the state saved in `directory`, by whatever ranks."""
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
        """Leave the process group."""
        dist.destroy_process_group()
