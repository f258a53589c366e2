"""A run's groups of Ray actors, training ranks and rollout replicas, and how they are started.

`TrainerRanks` and `RolloutReplicas` hide how work is divided over them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from verl.agent.environment import EnvironmentFactory, no_tools
from verl.agent.interface import Agent
from verl.config import Config
from verl.errors import ConfigError, explain
from verl.monitor.performance import WorkCounter
from verl.rollout.interface import EngineDied, engine_takes_adapter
from verl.rollout.pool import NullRolloutPool
from verl.rollout.replica import RolloutReplica
from verl.rollout.replicas import RolloutReplicas
from verl.single_controller.actors import RayWorkerGroup, Restarts
from verl.single_controller.placement import (
    create_rollout_group,
    create_trainer_group,
    engine_gpu_locations,
    first_index_per_node,
    nodes_of,
    reserve,
)
from verl.single_controller.reaper import MARK, OrphanReaper
from verl.trainer.cluster import JOB_CONFIG, anchored, check_nodes, uses_gpus
from verl.trainer.ranks import BatchSharding, TrainerRanks
from verl.training.devices import DETERMINISTIC_ENV, SPIN_COUNT, rollout_dtype
from verl.training.network import forwarded_variables
from verl.training.worker import CriticWorker, TrainerWorker, TrainingRank


@dataclass(frozen=True)
class Placed:
    """Training ranks that have their locations and are not built yet."""

    config: Config
    """For processes elsewhere (`anchored`)."""
    use_gpu: bool
    room: PlacementGroup
    """The actor's ranks are in it, and the engines' own GPUs."""
    env: Mapping[str, str]
    ranks: TrainerRanks


def place_ranks(config: Config, tools: EnvironmentFactory, reaper: OrphanReaper) -> Placed:
    """Reserve what the run takes of each node, look at the nodes, and start the ranks' actors."""
    use_gpu = uses_gpus(config)
    config = anchored(config, use_gpu)
    rooms = reserve_ranks(config, use_gpu)
    nodes = {node: address for room in rooms for node, address in nodes_of(room).items()}
    check_nodes(config, tools, nodes)
    threads = gpu_threads(nodes, config.gpus_per_node) if use_gpu else cpu_env(_is_crowded(config))
    env = forwarded_variables(os.environ) | threads | {MARK: reaper.mark}
    if config.trainer.deterministic:
        env |= DETERMINISTIC_ENV
    groups = create_ranks(config, rooms, use_gpu, env)
    policy_cost, critic_cost = WorkCounter(config).pair_costs
    size = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    ranks = TrainerRanks(
        *groups,
        policy=BatchSharding(policy_cost, size),
        critic=BatchSharding(critic_cost, config.critic_sp_size),
    )
    start_node_reapers(ranks.groups, reaper.mark)
    return Placed(config, use_gpu, rooms[0], env, ranks)


def build_ranks(
    config: Config, total_updates: int, reaper: OrphanReaper
) -> tuple[TrainerRanks, NullRolloutPool]:
    """The actors of a run that learns from recorded trajectories."""
    placed = place_ranks(config, no_tools, reaper)
    config, ranks = placed.config, placed.ranks
    begun = begin_ranks(ranks, ranks.groups[1:], CriticWorker, config, total_updates)
    begun += begin_ranks(ranks, [ranks.group], TrainerWorker, config, total_updates)
    for group, built in begun:
        group.gather(built)
    return ranks, NullRolloutPool(rollout_dtype(config))


def build_groups(
    config: Config,
    agent_factory: Callable[[Config], Agent],
    tools: EnvironmentFactory,
    total_updates: int,
    reaper: OrphanReaper,
    restarts: Restarts,
) -> tuple[TrainerRanks, RolloutReplicas]:
    """Place and build all actors; engines and ranks load together where no GPU is shared."""
    refuse_crowded_cards(config, uses_gpus(config))
    placed = place_ranks(config, tools, reaper)
    config, use_gpu, env, ranks = placed.config, placed.use_gpu, placed.env, placed.ranks
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    own_gpus, num_replicas = trainer.rollout_gpus, config.num_engines(use_gpu)
    locations = ranks.group.locations()
    has_gpus = use_gpu and not config.is_external
    per_replica = rollout.tensor_model_parallel_size if has_gpus else 0
    theirs = engine_gpu_locations(placed.room, own_gpus) if use_gpu and own_gpus else locations
    replicas = create_rollout_group(theirs, num_replicas, per_replica, env, (EngineDied,))
    replicas.locations()
    arguments = [(config, agent_factory, replica) for replica in range(num_replicas)]
    replicas_built = replicas.start_build(RolloutReplica, arguments)
    begun = begin_ranks(ranks, ranks.groups[1:], CriticWorker, config, total_updates)
    must_wait = use_gpu and config.is_colocated
    if must_wait:
        start_engines(replicas, replicas_built, then_sleep=True)
    begun += begin_ranks(ranks, [ranks.group], TrainerWorker, config, total_updates)
    if not must_wait:
        start_engines(replicas, replicas_built, then_sleep=False)
    for group, built in begun:
        group.gather(built)
    return ranks, RolloutReplicas(
        replicas,
        arguments,
        restarts,
        takes_adapter=engine_takes_adapter(config),
        shares_devices=config.is_colocated,
        overlaps=rollout.max_staleness > 0,
        hang_timeout=trainer.hang_timeout,
        empty_cache=ranks.empty_cache if config.is_colocated else (lambda: None),
        weight_sync=rollout.weight_sync,
        weights_root=None if rollout.weights_dir is None else Path(rollout.weights_dir),
        is_divided=rollout.replay is not None,
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


def start_node_reapers(groups: Sequence[RayWorkerGroup], mark: str) -> None:
    """Start a reaper of orphans on each node but the driver's, which has the run's own."""
    guarded = {ray.get_runtime_context().get_node_id()}
    for group in groups:
        locations = group.locations()
        others = [i for i in first_index_per_node(locations) if locations[i].node_id not in guarded]
        group.gather([group.hosts[i].start_reaper.remote(mark) for i in others])
        guarded |= {locations[i].node_id for i in others}


def reserve_ranks(config: Config, use_gpu: bool) -> list[PlacementGroup]:
    """Room for the actor's ranks, with the engines' GPUs beside them, and for a critic's own."""
    trainer, seconds = config.trainer, config.trainer.node_timeout
    actor = reserve(config.num_ranks, trainer.nnodes, use_gpu, seconds, trainer.rollout_gpus)
    if not config.has_own_critic:
        return [actor]
    return [actor, reserve(config.num_critic_ranks, config.critic_nodes, use_gpu, seconds)]


def create_ranks(
    config: Config, rooms: Sequence[PlacementGroup], use_gpu: bool, env: Mapping[str, str]
) -> list[RayWorkerGroup]:
    """A group of actors in each room."""
    kinds = (("rank", config.num_ranks), ("critic rank", config.num_critic_ranks))
    return [
        create_trainer_group(room, size, use_gpu, env, name)
        for room, (name, size) in zip(rooms, kinds, strict=False)
    ]


def begin_ranks(
    ranks: TrainerRanks, groups: Sequence[RayWorkerGroup], kind: type[TrainingRank],
    config: Config, total_updates: int,
) -> list[tuple[RayWorkerGroup, list[Any]]]:  # fmt: skip
    """Begin to build ranks, which meet at the first of their group; groups and Ray references."""
    begun = []
    for group in groups:
        others = [
            location.node_id
            for one in ranks.groups
            if one is not group
            for location in one.locations()
        ]
        address = (group.locations()[0].host, group.free_port())
        arguments = [
            (config, rank, len(group), *address, total_updates, others.count(location.node_id))
            for rank, location in enumerate(group.locations())
        ]
        begun.append((group, group.start_build(kind, arguments)))
    return begun


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


def _is_crowded(config: Config) -> bool:
    """Whether several processes compute on the same cores at the same time."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    overlaps = rollout.max_staleness > 0 and not config.is_split
    most = max(config.num_ranks, config.num_engines(on_gpu=False))
    return overlaps or config.has_own_critic or most > trainer.nnodes


def cpu_env(is_crowded: bool = False) -> dict[str, str]:
    """Environment of actors that compute on the CPU.

    Ray would pin them to one thread. Threads spin for some ten microseconds before they sleep:
    a layer is a dozen small parts, and to be woken for each takes longer than the part
    (docs/evidence/updates.md). Where the cores are crowded they sleep at once; what the user set
    wins. And memory that was touched once is kept, since giving it back after each forward costs
    more in page faults than the forward itself: in one arena, for Ray calls an actor in a thread
    whose own arena would be given back whatever the threshold; in huge pages, of which fewer are
    touched.
    """
    return {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "0" if is_crowded else SPIN_COUNT),
        "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_ARENA_MAX": "1",
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
    }
