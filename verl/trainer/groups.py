"""Starts a run's groups of Ray actors: training ranks and rollout replicas."""

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
from verl.model_shape import pair_costs
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
from verl.threads import SPIN_COUNT, spin_count
from verl.trainer.cluster import JOB_CONFIG, check_nodes, config_for_actors, fetch_models, uses_gpus
from verl.trainer.ranks import BatchSharding, TrainerRanks
from verl.training.allocator import engine_variables, rank_variables
from verl.training.devices import DETERMINISTIC_ENV, rollout_dtype
from verl.training.network import forwarded_variables
from verl.training.worker import CriticWorker, TrainerWorker, TrainingRank

HANG_TIMEOUT_S = 600.0
"""Time without a sign of life after which a rollout replica counts as dead."""


@dataclass(frozen=True)
class PlacedRanks:
    """Training ranks whose Ray actors are placed on nodes, but whose models are not built yet."""

    config: Config
    """The configuration for the actors (`config_for_actors`)."""
    placement: PlacementGroup
    """Placement group of the actor's ranks and of the engines' own GPUs."""
    env: Mapping[str, str]
    """Environment variables of the engines."""
    ranks: TrainerRanks


def place_ranks(
    config: Config, environment_factory: EnvironmentFactory, reaper: OrphanReaper
) -> PlacedRanks:
    """Reserve the run's resources on the nodes, check the nodes, and start the ranks' actors."""
    use_gpu = uses_gpus(config)
    config = config_for_actors(config, use_gpu)
    placements = reserve_placements(config, use_gpu)
    nodes: dict[str, str] = {}
    for placement in placements:
        nodes |= nodes_of(placement)
    check_nodes(config, environment_factory, nodes)
    fetch_models(config, nodes)
    env = forwarded_variables(os.environ)
    gpus = config.placement.gpus_per_node
    env |= gpu_env(nodes, gpus) if use_gpu else cpu_env(_shares_cores(config))
    env[MARK] = reaper.mark
    if config.trainer.deterministic:
        env |= DETERMINISTIC_ENV
    allocator = allocator_variables(config) if use_gpu else ({}, {})
    rank_env, engine_env = (env | own for own in allocator)
    groups = create_rank_groups(config, placements, use_gpu, rank_env)
    policy_cost, critic_cost = pair_costs(config)
    policy_sp_size = config.actor_rollout_ref.actor.ulysses_sequence_parallel_size
    ranks = TrainerRanks(
        *groups,
        policy=BatchSharding(policy_cost, policy_sp_size),
        critic=BatchSharding(critic_cost, config.placement.critic_sp_size),
    )
    start_node_reapers(ranks.groups, reaper.mark)
    return PlacedRanks(config, placements[0], engine_env, ranks)


def build_ranks(
    config: Config, total_updates: int, reaper: OrphanReaper
) -> tuple[TrainerRanks, NullRolloutPool]:
    """Build the training ranks of a run that trains on recorded trajectories, without engines."""
    placed = place_ranks(config, no_tools, reaper)
    config, ranks = placed.config, placed.ranks
    pending = start_building_ranks(ranks, ranks.groups[1:], CriticWorker, config, total_updates)
    pending += start_building_ranks(ranks, [ranks.group], TrainerWorker, config, total_updates)
    for group, calls in pending:
        group.gather(calls)
    return ranks, NullRolloutPool(rollout_dtype(config))


def build_groups(
    config: Config,
    agent_factory: Callable[[Config], Agent],
    environment_factory: EnvironmentFactory,
    total_updates: int,
    reaper: OrphanReaper,
    restarts: Restarts,
) -> tuple[TrainerRanks, RolloutReplicas]:
    """Place and build all actors; engines and ranks load concurrently unless they share GPUs."""
    use_gpu = uses_gpus(config)
    check_engine_gpus(config, use_gpu)
    placed = place_ranks(config, environment_factory, reaper)
    config, ranks = placed.config, placed.ranks
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    num_replicas = config.placement.num_engines(use_gpu)
    is_external = config.placement.is_external
    num_gpus = rollout.tensor_model_parallel_size if use_gpu and not is_external else 0
    locations = ranks.group.locations()
    if use_gpu and trainer.rollout_gpus:
        locations = engine_gpu_locations(placed.placement, trainer.rollout_gpus)
    replicas = create_rollout_group(locations, num_replicas, num_gpus, placed.env, (EngineDied,))
    replicas.locations()  # known from now on, for messages about lost replicas
    arguments = [(config, agent_factory, replica) for replica in range(num_replicas)]
    replica_calls = replicas.start_build(RolloutReplica, arguments)
    pending = start_building_ranks(ranks, ranks.groups[1:], CriticWorker, config, total_updates)
    # Engines on the ranks' GPUs load first and then sleep, so that the ranks have the memory.
    shares_gpus = use_gpu and config.placement.is_colocated
    if shares_gpus:
        start_engines(replicas, replica_calls, then_sleep=True)
    pending += start_building_ranks(ranks, [ranks.group], TrainerWorker, config, total_updates)
    if not shares_gpus:
        start_engines(replicas, replica_calls, then_sleep=False)
    for group, calls in pending:
        group.gather(calls)
    return ranks, RolloutReplicas(
        replicas,
        arguments,
        restarts,
        takes_adapter=engine_takes_adapter(config),
        shares_devices=config.placement.is_colocated,
        overlaps=rollout.max_staleness > 0,
        hang_timeout=HANG_TIMEOUT_S,
        empty_cache=ranks.empty_cache if config.placement.is_colocated else (lambda: None),
        weight_sync=rollout.weight_sync,
        weights_root=None if rollout.weights_dir is None else Path(rollout.weights_dir),
    )


def check_engine_gpus(config: Config, use_gpu: bool) -> None:
    """Raise ConfigError if engines sample while their GPUs train, or have too few GPUs."""
    if not use_gpu or config.placement.is_external:
        return
    rollout, section = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    if rollout.max_staleness and not config.placement.is_split:
        key, expected = f"{section}.max_staleness", "0: engines share the ranks' GPUs"
        fix = "give engines their own GPUs: trainer.rollout_gpus=N and fewer n_gpus_per_node"
        raise ConfigError(explain(key, rollout.max_staleness, expected, fix))
    plan = config.placement
    num_engines, max_engines = plan.num_engines(on_gpu=True), plan.engine_slots
    if num_engines > max_engines:
        key = f"{section}.num_replicas"
        expected = f"at most {max_engines}: no more fit on the engines' GPUs"
        raise ConfigError(explain(key, num_engines, expected, f"{key}=null"))


def start_node_reapers(groups: Sequence[RayWorkerGroup], mark: str) -> None:
    """Start an orphan reaper on each node except the driver's, which has one already."""
    guarded = {ray.get_runtime_context().get_node_id()}
    for group in groups:
        locations = group.locations()
        others = [i for i in first_index_per_node(locations) if locations[i].node_id not in guarded]
        group.gather([group.hosts[i].start_reaper.remote(mark) for i in others])
        guarded |= {locations[i].node_id for i in others}


def reserve_placements(config: Config, use_gpu: bool) -> list[PlacementGroup]:
    """Reserve resources for the actor's ranks with the engines' own GPUs, and a separate critic."""
    trainer, plan, timeout_s = config.trainer, config.placement, config.trainer.node_timeout
    actor = reserve(plan.num_ranks, trainer.nnodes, use_gpu, timeout_s, trainer.rollout_gpus)
    if not plan.has_own_critic:
        return [actor]
    return [actor, reserve(plan.num_critic_ranks, plan.critic_nodes, use_gpu, timeout_s)]


def create_rank_groups(
    config: Config, placements: Sequence[PlacementGroup], use_gpu: bool, env: Mapping[str, str]
) -> list[RayWorkerGroup]:
    """Create the group of the actor's ranks and, with a second placement, of the critic's ranks."""
    plan = config.placement
    kinds = (("rank", plan.num_ranks), ("critic rank", plan.num_critic_ranks))
    return [
        create_trainer_group(placement, size, use_gpu, env, name)
        for placement, (name, size) in zip(placements, kinds, strict=False)
    ]


def start_building_ranks(
    ranks: TrainerRanks, groups: Sequence[RayWorkerGroup], kind: type[TrainingRank],
    config: Config, total_updates: int,
) -> list[tuple[RayWorkerGroup, list[Any]]]:  # fmt: skip
    """Start building ranks, which rendezvous at the first of their group.

    Returns each group with the Ray references of its calls.
    """
    pending = []
    for group in groups:
        others = [loc.node_id for g in ranks.groups if g is not group for loc in g.locations()]
        address = (group.locations()[0].host, group.free_port())
        arguments = [
            (config, rank, len(group), *address, total_updates, others.count(location.node_id))
            for rank, location in enumerate(group.locations())
        ]
        pending.append((group, group.start_build(kind, arguments)))
    return pending


def start_engines(replicas: RayWorkerGroup, calls: Sequence[object], then_sleep: bool) -> None:
    """Wait for the replicas' build `calls`, load the engines, and put them to sleep if asked."""
    replicas.gather(calls)
    replicas.call("engine.start_for_training")
    if then_sleep:
        replicas.call("engine.sleep")


def allocator_variables(config: Config) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables of torch's allocator, of ranks and of engines on GPUs."""
    weight_sync = config.actor_rollout_ref.rollout.weight_sync
    return rank_variables(os.environ, weight_sync), engine_variables(os.environ)


def gpu_env(
    nodes: Collection[str], per_node: int, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment variables that set the number of threads of actors on GPU hosts.

    Each gets a GPU's share of the smallest node's cores, where Ray would set one thread; offloaded
    AdamW and writing weights profit from more. `nodes` are Ray's node ids. The user's own setting
    takes precedence, but not the 1 that Ray itself sets in the driver of a job.
    """
    user_threads = environment.get("OMP_NUM_THREADS")
    if user_threads and not (user_threads == "1" and JOB_CONFIG in environment):
        return {"OMP_NUM_THREADS": user_threads}
    cores = min(node["Resources"]["CPU"] for node in ray.nodes() if node["NodeID"] in nodes)
    return {"OMP_NUM_THREADS": str(max(1, int(cores) // per_node))}


def _shares_cores(config: Config) -> bool:
    """Whether several processes compute on the same cores at the same time."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    plan = config.placement
    samples_while_training = rollout.max_staleness > 0 and not plan.is_split
    num_processes = max(plan.num_ranks, plan.num_engines(on_gpu=False))
    return samples_while_training or plan.has_own_critic or num_processes > trainer.nnodes


def cpu_env(shares_cores: bool = False) -> dict[str, str]:
    """Return the environment variables of actors that compute on the CPU.

    Threads: all cores, where Ray would set one thread. Idle threads spin for some ten microseconds
    before they sleep, because a layer consists of a dozen small operations, and waking a thread for
    each takes longer than the operation (docs/evidence/updates.md). With `shares_cores`, they sleep
    at once. The user's own GOMP_SPINCOUNT and GLIBC_TUNABLES take precedence.

    Memory: malloc keeps freed memory, because returning it to the system after each forward pass
    costs more in page faults than the pass itself. There is a single arena, because Ray calls an
    actor in a thread whose own arena would be returned regardless of the threshold. Huge pages
    reduce the number of page faults.
    """
    return {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "GOMP_SPINCOUNT": spin_count("0" if shares_cores else SPIN_COUNT),
        "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_ARENA_MAX": "1",
        "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
    }
