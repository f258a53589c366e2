"""A run's two groups of Ray actors, training ranks and rollout replicas, and how they are started.

Both hide how work is divided: the trainer passes whole batches and gets whole answers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import ray
from torch import Tensor

from verl.agent.environment import EnvironmentFactory
from verl.agent.interface import Agent
from verl.config import Config
from verl.errors import ConfigError, SaveError, explain
from verl.monitor.flops import peak_flops
from verl.rollout.interface import EngineDied, engine_takes_adapter
from verl.rollout.replica import RolloutReplica
from verl.rollout.replicas import RolloutReplicas
from verl.single_controller.actors import RayWorkerGroup
from verl.single_controller.dispatch import join_tokens, split_by_tokens
from verl.single_controller.placement import (
    create_rollout_group,
    create_trainer_group,
    first_of_nodes,
    gpus_beside,
    nodes_of,
    reserve,
)
from verl.single_controller.reaper import MARK, OrphanReaper
from verl.single_controller.restarts import Restarts
from verl.trainer.cluster import JOB_CONFIG, anchored, check_nodes, uses_gpus
from verl.training.devices import DETERMINISTIC_ENV, PeakMemory
from verl.training.network import forwarded
from verl.training.node_folder import on_node
from verl.training.worker import TrainerWorker
from verl.types import Metrics, TokenBatch


class TrainerRanks:
    """FSDP ranks that hold actor, reference and critic."""

    def __init__(self, group: RayWorkerGroup) -> None:
        self.group = group

    def _per_token(self, method: str, batch: TokenBatch) -> Tensor:
        split = split_by_tokens(batch, len(self.group))
        return join_tokens(self.group.scatter(method, split.shards), split, batch)

    def log_probs(self, batch: TokenBatch) -> Tensor:
        """The actor's log-probs, (num_tokens,), 0 outside the loss mask."""
        return self._per_token("actor.log_probs", batch)

    def ref_log_probs(self, batch: TokenBatch) -> Tensor:
        """The reference's log-probs, (num_tokens,), 0 outside the loss mask."""
        return self._per_token("reference.log_probs", batch)

    def values(self, batch: TokenBatch) -> Tensor:
        """The critic's values, (num_tokens,), 0 outside the loss mask."""
        return self._per_token("critic.values", batch)

    def update_actor(self, mini_batch: TokenBatch) -> Metrics:
        """One optimizer step of the policy; metrics are global, the same on every rank."""
        return self._update("actor.update", mini_batch)

    def update_critic(self, mini_batch: TokenBatch) -> Metrics:
        """One optimizer step of the critic; metrics are global, the same on every rank."""
        return self._update("critic.update", mini_batch)

    def _update(self, method: str, mini_batch: TokenBatch) -> Metrics:
        split = split_by_tokens(mini_batch, len(self.group))
        return dict(self.group.scatter(method, split.shards)[0])

    def save_policy(
        self, directory: Path, dtype: str = "bfloat16", is_adapter: bool = False
    ) -> None:
        """Write the policy once, as a Hugging Face folder, or its adapter as peft's folder."""
        self.group.call("save_policy", str(directory.absolute()), dtype, is_adapter)

    def share_policy(
        self, directory: Path, version: int, needed: Sequence[int], dtype: str, is_adapter: bool
    ) -> float:
        """Write the policy, or its adapter, on each node for its engines (`replicas.Policy`).

        Returns the seconds of writing files, of the node that took longest.
        """
        folders = [str(on_node(directory, place.node_id)) for place in self.group.places()]
        given = (version, needed, dtype, is_adapter)
        seconds: list[float] = self.group.scatter("share_policy", folders, *given)
        return max(seconds)

    def save_checkpoint(self, directory: Path) -> None:
        """Every rank writes its shards below `directory`. Raises SaveError."""
        raise_first(self.group.call("save_checkpoint", str(directory.absolute())))

    def start_checkpoint(self, directory: Path) -> None:
        """Every rank copies its shards to host memory and begins to write them."""
        self.group.call("start_checkpoint", str(directory.absolute()))

    def finish_checkpoint(self) -> None:
        """Wait until what `start_checkpoint` began is written. Raises SaveError."""
        raise_first(self.group.call("finish_checkpoint"))

    def checkpoint_bytes(self) -> int:
        """Bytes of all ranks' shards."""
        return sum(num_bytes for _, num_bytes, _ in self.group.call("checkpoint_room"))

    def can_copy_checkpoint(self) -> bool:
        """Whether each host has the memory for a copy of the shards of its ranks."""
        room, needed = self.group.call("checkpoint_room"), Counter[str]()
        for host, num_bytes, _ in room:
            needed[host] += num_bytes
        return all(needed[host] < 0.8 * available for host, _, available in room)

    def load_checkpoint(self, directory: Path) -> None:
        """Every rank reads its shards from `directory`."""
        self.group.call("load_checkpoint", str(directory.absolute()))

    def scale_lr(self, scale: float) -> None:
        """Actor and critic learn at `scale` times their configured rates from now on."""
        self.group.call("scale_lr", scale)

    def empty_cache(self) -> None:
        """Give back the devices' memory that torch keeps for reuse."""
        self.group.call("empty_cache")

    def take_peak_memory(self) -> PeakMemory | None:
        """The most that any rank held of its device since the last call; None on CPU."""
        peaks = [peak for peak in self.group.call("take_peak_memory") if peak is not None]
        if not peaks:
            return None
        return PeakMemory(max(p.allocated for p in peaks), max(p.reserved for p in peaks))

    def peak_flops(self) -> float | None:
        """FLOP/s of a rank's card at most; None where that is not known, as on CPU."""
        return peak_flops(*self.group.call("card")[0])

    def shutdown(self) -> None:
        """End the ranks."""
        self.group.shutdown()


def raise_first(problems: Sequence[str]) -> None:
    """Raise SaveError with the first rank's problem, if any rank had one."""
    for rank, problem in enumerate(problems):
        if problem:
            raise SaveError(problem if problem.startswith("rank ") else f"rank {rank}: {problem}")


def build_groups(
    config: Config,
    agent_factory: Callable[[Config], Agent],
    tools: EnvironmentFactory,
    total_updates: int,
    reaper: OrphanReaper,
    restarts: Restarts,
) -> tuple[TrainerRanks, RolloutReplicas]:
    """Place and build all actors; engines and ranks load together where no GPU is shared."""
    use_gpu = uses_gpus(config)
    refuse_crowded_cards(config, use_gpu)
    config = anchored(config, use_gpu)
    trainer = config.trainer
    own_gpus, num_replicas = trainer.rollout_gpus, config.num_engines(use_gpu)
    placement = reserve(config.num_ranks, trainer.nnodes, use_gpu, trainer.node_timeout, own_gpus)
    nodes = nodes_of(placement)
    check_nodes(config, tools, nodes)
    threads = gpu_threads(nodes, config.gpus_per_node) if use_gpu else cpu_env()
    env = forwarded(os.environ) | threads | {MARK: reaper.mark}
    if config.trainer.deterministic:
        env |= DETERMINISTIC_ENV
    ranks = create_trainer_group(placement, config.num_ranks, use_gpu, env)
    guard_nodes(ranks, reaper.mark)
    places = ranks.places()
    rollout = config.actor_rollout_ref.rollout
    has_gpus = use_gpu and not config.is_external
    per_replica = rollout.tensor_model_parallel_size if has_gpus else 0
    theirs = gpus_beside(placement, own_gpus) if use_gpu and own_gpus else places
    replicas = create_rollout_group(theirs, num_replicas, per_replica, env, (EngineDied,))
    replicas.places()
    arguments = [(config, agent_factory, replica) for replica in range(num_replicas)]
    replicas_built = replicas.start_build(RolloutReplica, arguments)
    must_wait = use_gpu and config.shares_devices
    if must_wait:
        start_engines(replicas, replicas_built, then_sleep=True)
    address = (places[0].host, ranks.free_port())
    size = config.num_ranks
    ranks_built = ranks.start_build(
        TrainerWorker, [(config, rank, size, *address, total_updates) for rank in range(size)]
    )
    if not must_wait:
        start_engines(replicas, replicas_built, then_sleep=False)
    ranks.gather(ranks_built)
    trainer_ranks = TrainerRanks(ranks)
    return trainer_ranks, RolloutReplicas(
        replicas,
        arguments,
        restarts,
        takes_adapter=engine_takes_adapter(config),
        shares_devices=config.shares_devices,
        overlaps=rollout.max_staleness > 0,
        hang_timeout=trainer.hang_timeout,
        empty_cache=trainer_ranks.empty_cache if config.shares_devices else (lambda: None),
        weights_root=None if rollout.weights_dir is None else Path(rollout.weights_dir),
    )


def refuse_crowded_cards(config: Config, use_gpu: bool) -> None:
    """Raise ConfigError for engines that sample while ranks train on their GPUs, and for more
    engines than GPUs hold."""
    if not use_gpu or config.is_external:
        return
    rollout, section = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if rollout.max_staleness and not config.is_split:
        key, expected = f"{section}.max_staleness", "0: engines share the ranks' GPUs"
        fix = "give them GPUs of their own, trainer.rollout_gpus=N beside fewer n_gpus_per_node"
        raise ConfigError(explain(key, rollout.max_staleness, expected, fix))
    number, most = config.num_engines(on_gpu=True), config.engine_slots
    if number > most:
        key = f"{section}.num_replicas"
        expected = f"at most {most}: the GPUs for engines hold no more"
        raise ConfigError(explain(key, number, expected, f"{key}=null"))


def guard_nodes(ranks: RayWorkerGroup, mark: str) -> None:
    """Start a reaper of orphans on each node but the driver's, which has the run's own."""
    places = ranks.places()
    own = ray.get_runtime_context().get_node_id()
    others = [i for i in first_of_nodes(places) if places[i].node_id != own]
    ranks.gather([ranks.hosts[i].guard.remote(mark) for i in others])


def start_engines(replicas: RayWorkerGroup, built: Sequence[object], then_sleep: bool) -> None:
    """Load the engines; on shared GPUs they then give the memory to the ranks."""
    replicas.gather(built)
    replicas.call("engine.start")
    if then_sleep:
        replicas.call("engine.sleep")


def gpu_threads(
    nodes: Collection[str], per_node: int, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Threads of each rank and engine on GPU hosts: a GPU's share of the smallest node's cores.

    Ray would pin them to one; AdamW of what is offloaded and the writing of weights profit. `nodes`
    are Ray's ids. What the user set wins, but not the 1 that Ray itself sets in a job's driver.
    """
    own = environment.get("OMP_NUM_THREADS")
    if own and not (own == "1" and JOB_CONFIG in environment):
        return {"OMP_NUM_THREADS": own}
    alive = ray.nodes()
    cores = min(node["Resources"]["CPU"] for node in alive if node["NodeID"] in nodes)
    return {"OMP_NUM_THREADS": str(max(1, int(cores) // per_node))}


def cpu_env() -> dict[str, str]:
    """Environment of actors that compute on the CPU.

    Ray would pin them to one thread. Ranks and engines take turns on the same cores: idle threads
    must sleep, not spin. And memory that was touched once is kept, since giving it back after each
    forward costs more in page faults than the forward itself.
    """
    return {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
        "MALLOC_MMAP_MAX_": "0",
    }
