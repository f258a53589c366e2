"""A training rank of the actor, and of reference and critic where the algorithm needs them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from verl.config import AdapterConfig
from verl.core_algos.advantages import ADVANTAGES
from verl.training.actor import Actor
from verl.training.budgets import actor_budgets
from verl.training.crews import check_heads
from verl.training.critic import Critic, critic_of, critic_options, own_engine
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.kernels import prepare_blocks, use_kernels
from verl.training.loading import blank_copy
from verl.training.lora import Role, adapted_engine, policy_adapter, policy_weights, share
from verl.training.models import LogProbModel, blocks
from verl.training.node_folder import NodeFolder
from verl.training.rank import TrainingRank
from verl.training.weight_broadcast import WeightBroadcast
from verl.training.weight_stream import Sent, card, send
from verl.training.weights import write_weights


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
        self.actor, self.engines = self._policy(engine), {"actor": engine}
        self.reference: Actor | None = None
        if config.needs_reference:
            self.reference = self._policy(self._reference_engine(engine, twin))
        self.critic: Critic | None = None
        if self.has_critic:
            shared = config.shares_base
            own = share(engine, Role.CRITIC, critic_options(self)) if shared else own_engine(self)
            self.critic, self.engines["critic"] = critic_of(self, own), own

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
            crew=self.crew(section.actor.ulysses_sequence_parallel_size),
            held=section.actor.fsdp_config,
        )
        if not section.model.has_adapter:
            return FsdpModel(LogProbModel(lm), blocks(lm, lm), self.device, options)
        adapters: dict[Role, AdapterConfig] = {Role.ACTOR: section.model}
        if self.has_critic and self.config.shares_base:
            adapters[Role.CRITIC] = self.config.critic.model
        return adapted_engine(lm, adapters, self.device, options)

    def _reference_engine(self, actor: FsdpModel, twin: PreTrainedModel | None) -> FsdpModel:
        held, crew = self.config.actor_rollout_ref.ref.fsdp_config, actor.options.crew
        options = FsdpOptions(compute_dtype=self.dtype, crew=crew, held=held)
        if twin is None:
            return share(actor, Role.REFERENCE, options)
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

    def card_name(self) -> str:
        """The device of this rank, as engines' workers there call it."""
        return card(self.device)

    def open_broadcast(self, host: str, num_receivers: int) -> str:
        """Let workers of engines on other devices join; returns the name of the stream."""
        sends_changes = self.config.actor_rollout_ref.rollout.weight_delta
        self._broadcast = WeightBroadcast(host, num_receivers, self.device, sends_changes)
        return self._broadcast.stream

    def send_policy(self, num_receivers: int, stream: str, dtype: str) -> Sent:
        """Send the policy, with its adapter merged into it, to engines' workers: those on this
        device, or all that have joined the stream that this rank opened."""
        named, target = policy_weights(self.actor.engine, dtype), getattr(torch, dtype)
        if self._broadcast is not None and self._broadcast.stream == stream:
            sent = self._broadcast.send(named, target)
        else:
            sent = send(named, stream, self.device, num_receivers, target)
        dist.barrier()
        return sent

    def _write_policy(
        self, directory: Path, dtype: str, is_adapter: bool, writer: int, num_writers: int
    ) -> float:
        """Every rank gives its shards; the first writers write them. Returns their seconds."""
        seconds = 0.0
        if is_adapter:
            adapter = policy_adapter(self.actor.engine)
            start = time.perf_counter()
            if writer == 0:
                adapter.write(directory)
            seconds = time.perf_counter() - start
        else:
            named = policy_weights(self.actor.engine, dtype)
            if writer < num_writers:
                parts = (writer, num_writers)
                seconds = write_weights(directory, named, self.model_config, dtype, *parts)
            for _ in named:  # each tensor is gathered by all ranks together
                pass
        dist.barrier()
        return seconds

    def shutdown(self) -> None:
        """Leave the process group, and take the weights out of the node's memory."""
        if self._folder is not None:
            self._folder.close()
        super().shutdown()
