"""Starts a run's groups of Ray actors: training ranks and rollout replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from ray.util.placement_group import PlacementGroup

from verl.agent.environment import EnvironmentFactory, no_tools
from verl.agent.interface import Agent
from verl.config import Config
from verl.ports import free_port
from verl.rollout.interface import EngineDied
from verl.rollout.replica import RolloutReplica
from verl.rollout.replicas import RolloutReplicas
from verl.rollout.rollouts import TrainedRollouts
from verl.single_controller.actors import RayWorkerGroup
from verl.single_controller.placement import (
    create_rollout_group,
    create_trainer_group,
    engine_gpu_locations,
    nodes_of,
    reserve,
)
from verl.trainer.cluster import config_for_actors, uses_gpus
from verl.trainer.hooks import Hook
from verl.trainer.ranks import TrainerRanks
from verl.training.allocator import engine_variables, rank_variables
from verl.training.devices import DETERMINISTIC_ENV
from verl.training.network import forwarded_variables
from verl.training.worker import TrainerWorker
from verl.weights.files import selected_transport

Nodes = Mapping[str, str]
"""Addresses of the nodes of a run, by Ray's node id."""


@dataclass
class StartUp:
    """What optional features do when a run's actors start (`verl.trainer.build.STARTERS`)."""

    environment_factory: EnvironmentFactory = no_tools
    """Makes the agents' tools."""
    checks: list[Callable[[Config, Nodes], None]] = field(default_factory=list)
    """Called before the actors start, with their configuration."""
    variables: list[Callable[[Config, Nodes], Mapping[str, str]]] = field(default_factory=list)
    """Return environment variables of all actors."""
    replica_variables: Callable[[int], Mapping[str, str]] = lambda replica: {}
    """Returns those of a replica, by its number."""
    on_started: list[Callable[[Sequence[RayWorkerGroup]], None]] = field(default_factory=list)
    """Called when the ranks' actors have started, and nothing is built yet."""
    clean_up: Callable[[], None] | None = None
    """Called in an actor that takes the place of a lost replica's."""
    wrap: Callable[[RolloutReplicas], TrainedRollouts] = lambda replicas: replicas
    """Returns what stands in for the replicas."""
    hooks: list[Hook] = field(default_factory=list)
    """Hooks of the run that outlive its trainer."""
    end: ExitStack = field(init=False, default_factory=ExitStack)
    """Closed after the last process has ended."""


@dataclass(frozen=True)
class StartedRanks:
    """Training ranks whose Ray actors have started, but whose models are not built yet."""

    config: Config
    """The configuration for the actors (`config_for_actors`)."""
    placement: PlacementGroup
    """Placement group of the actor's ranks and of the engines' own GPUs."""
    engine_env: Mapping[str, str]
    """Environment variables of all engines."""
    ranks: TrainerRanks


def start_ranks(config: Config, start_up: StartUp) -> StartedRanks:
    """Reserve the run's resources on the nodes, check the nodes, and start the ranks' actors."""
    use_gpu = uses_gpus(config)
    config = config_for_actors(config, use_gpu)
    placements = reserve_groups(config, use_gpu)
    nodes: dict[str, str] = {}
    for placement in placements.values():
        nodes |= nodes_of(placement)
    for check in start_up.checks:
        check(config, nodes)
    rank_env, engine_env = actor_variables(config, use_gpu, nodes, start_up)
    plan = config.placement
    groups = {
        name: create_trainer_group(placements[name], group.num_ranks, use_gpu, rank_env, name)
        for name, group in plan.groups.items()
    }
    ranks = TrainerRanks(
        {role: groups[place.group] for role, place in plan.roles.items()},
        {role: place.ranks_per_shard for role, place in plan.roles.items()},
    )
    for prepare in start_up.on_started:
        prepare(ranks.groups)
    return StartedRanks(config, placements[plan.actor.group], engine_env, ranks)


def build_groups(
    config: Config,
    agent_factory: Callable[[Config], Agent],
    total_updates: int,
    start_up: StartUp,
    replica_class: type[RolloutReplica] = RolloutReplica,
    replicas_class: type[RolloutReplicas] = RolloutReplicas,
) -> tuple[TrainerRanks, RolloutReplicas]:
    """Start and build all actors; engines and ranks load concurrently unless they share GPUs."""
    config.placement.check_engines(on_gpu=uses_gpus(config))
    started = start_ranks(config, start_up)
    config, ranks = started.config, started.ranks
    trainer, plan = config.trainer, config.placement
    use_gpu = trainer.device == "cuda"
    num_replicas = plan.num_engines(use_gpu)
    num_gpus = plan.engine_size if use_gpu else 0
    locations = ranks.group.locations()
    if use_gpu and trainer.rollout_gpus:
        locations = engine_gpu_locations(started.placement, trainer.rollout_gpus)
    replicas = create_rollout_group(
        locations, num_replicas, num_gpus,
        lambda replica: {**started.engine_env, **start_up.replica_variables(replica)},
        (EngineDied,),
    )  # fmt: skip
    replicas.locations()  # known from now on, for messages about lost replicas
    arguments = [(config, agent_factory, replica) for replica in range(num_replicas)]
    replica_calls = replicas.start_build(replica_class, arguments)
    apart = [group for group in ranks.groups if group is not ranks.group]
    pending = [start_building(ranks, group, config, total_updates) for group in apart]
    # Engines on the ranks' GPUs load first and then sleep, so that the ranks have the memory.
    shares_gpus = use_gpu and plan.is_colocated
    if shares_gpus:
        start_engines(replicas, replica_calls, then_sleep=True)
    pending.append(start_building(ranks, ranks.group, config, total_updates))
    if not shares_gpus:
        start_engines(replicas, replica_calls, then_sleep=False)
    for wait in pending:
        wait()
    empty_cache = partial(ranks.group.call, "empty_cache") if plan.is_colocated else None
    return ranks, replicas_class(replicas, selected_transport(config)(config), empty_cache)


def reserve_groups(config: Config, use_gpu: bool) -> dict[str, PlacementGroup]:
    """Reserve resources for each group of ranks; the actor's also has the engines' own GPUs."""
    plan, placements = config.placement, {}
    for name, group in plan.groups.items():
        engine_gpus = plan.own_engine_gpus if name == plan.actor.group else 0
        arguments = use_gpu, plan.patience_s, engine_gpus
        placements[name] = reserve(group.num_ranks, group.num_nodes, *arguments)
    return placements


def start_building(
    ranks: TrainerRanks, group: RayWorkerGroup, config: Config, total_updates: int
) -> Callable[[], object]:
    """Start building the ranks of a group, which rendezvous at the first of them.

    Returns a function that waits for them.
    """
    others = [loc.node_id for g in ranks.groups if g is not group for loc in g.locations()]
    address = (group.locations()[0].host, group.run(free_port, "", on=[0])[0])
    shared = len(group), *address, total_updates
    arguments = [
        (config, rank, *shared, others.count(location.node_id), group.name)
        for rank, location in enumerate(group.locations())
    ]
    return partial(group.gather, group.start_build(TrainerWorker, arguments))


def start_engines(replicas: RayWorkerGroup, calls: Sequence[object], then_sleep: bool) -> None:
    """Wait for the replicas' build `calls`, load the engines, and put them to sleep if asked."""
    replicas.gather(calls)
    replicas.call("engine.start_for_training")
    if then_sleep:
        replicas.call("engine.sleep")


def actor_variables(
    config: Config, use_gpu: bool, nodes: Nodes, start_up: StartUp
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return the environment variables of ranks and of engines."""
    shared = forwarded_variables(os.environ)
    for variables in start_up.variables:
        shared |= variables(config, nodes)
    if config.trainer.deterministic:
        shared |= DETERMINISTIC_ENV
    if not use_gpu:
        return shared, shared
    of_ranks = rank_variables(os.environ, selected_transport(config).shares_memory)
    return shared | of_ranks, shared | engine_variables(os.environ)
