"""Placement of a run's actors: reserved resources for training ranks, GPUs for rollout engines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from verl.errors import RankLost, ReplicaLost, ResourceError
from verl.single_controller.actors import ActorHost, ActorLocation, RayWorkerGroup, current_location

logger = logging.getLogger(__name__)

NOTICE_S = 20.0
"""Seconds between two log lines while a run waits for nodes."""
KEEP_VISIBLE_DEVICES = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Variables by which Ray leaves CUDA_VISIBLE_DEVICES as we set it, for actors that share GPUs."""
SET_VISIBLE_DEVICES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
"""Variable by which Ray shows each rank only its own GPU, even if the user's shell exports the
opposite, as other trainers require."""


def reserve(
    num_ranks: int, num_nodes: int, use_gpu: bool, timeout_s: float = 120.0, engine_gpus: int = 0
) -> PlacementGroup:
    """Reserve resources for the training ranks on `num_nodes` nodes, waiting for missing nodes.

    Also reserves `engine_gpus` GPUs per node for engines (`engine_gpu_locations`). Raises
    ResourceError if the cluster cannot provide all of it within `timeout_s`.
    """
    per_node = num_ranks // num_nodes
    bundle = {"CPU": float(per_node), **({"GPU": float(per_node + engine_gpus)} if use_gpu else {})}
    strategy = "STRICT_SPREAD" if num_nodes > 1 else "STRICT_PACK"
    placement: PlacementGroup = placement_group([bundle] * num_nodes, strategy=strategy)
    request = f"{num_nodes} x {bundle}"
    end = time.monotonic() + timeout_s
    while not placement.wait(max(0.0, min(NOTICE_S, end - time.monotonic()))):
        if time.monotonic() < end:
            logger.warning("waiting for %s in the Ray cluster: %s", request, describe_nodes())
            continue
        remove_placement_group(placement)
        raise ResourceError(
            f"the Ray cluster could not place {request} in {timeout_s:.0f} s: {describe_nodes()}; "
            "add nodes (docs/guides/clusters.md), lower trainer.n_gpus_per_node, "
            "trainer.rollout_gpus, critic.n_gpus_per_node or trainer.nnodes, "
            "or wait longer with trainer.node_timeout"
        )
    return placement


def describe_nodes() -> str:
    """Describe the cluster's nodes with their CPUs and GPUs, and the lost ones."""
    lines = []
    for node in ray.nodes():
        kinds = {kind: node["Resources"].get(kind, 0.0) for kind in ("CPU", "GPU")}
        state = ", ".join(f"{n:.0f} {kind}" for kind, n in kinds.items() if n or kind == "CPU")
        lines.append(f"{node['NodeManagerAddress']} ({state if node['Alive'] else 'lost'})")
    return f"{len(lines)} node(s), " + ", ".join(lines)


def nodes_of(placement: PlacementGroup) -> dict[str, str]:
    """Return the address of each node of a placement group, by node id."""
    ids = placement_group_table(placement)["bundles_to_node_id"].values()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return {node_id: addresses[node_id] for node_id in ids}


def create_trainer_group(
    placement: PlacementGroup, num_ranks: int, use_gpu: bool, env: Mapping[str, str],
    name: str = "rank",
) -> RayWorkerGroup:  # fmt: skip
    """Create one actor per training rank, in order; messages call an actor `name`."""
    per_node = num_ranks // placement.bundle_count
    options = [
        ActorHost.options(  # type: ignore[attr-defined]  # Ray's decorator adds it
            num_cpus=1,
            num_gpus=1 if use_gpu else 0,
            runtime_env={"env_vars": {**env, **SET_VISIBLE_DEVICES}},
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, rank // per_node),
        )
        for rank in range(num_ranks)
    ]
    return RayWorkerGroup(options, name, RankLost, placement)


def engine_gpu_locations(placement: PlacementGroup, engine_gpus: int) -> list[ActorLocation]:
    """Return a location for each GPU that was reserved for engines, node by node.

    Call it once every rank has its GPU: those left over are the engines'. The engines themselves
    stay outside the placement group, inside which vLLM would also start its own workers.
    """
    task = ray.remote(current_location)
    calls = []
    for bundle in range(placement.bundle_count):
        node = PlacementGroupSchedulingStrategy(placement, bundle)
        options = {"num_cpus": 0, "num_gpus": engine_gpus, "scheduling_strategy": node}
        calls.append(task.options(**options).remote())
    locations: list[ActorLocation] = ray.get(calls)
    return [replace(location, gpu_ids=(gpu,)) for location in locations for gpu in location.gpu_ids]


def first_index_per_node(locations: Sequence[ActorLocation]) -> list[int]:
    """Return the index of the first actor on each node."""
    nodes = [location.node_id for location in locations]
    return [nodes.index(node) for node in dict.fromkeys(nodes)]


def create_rollout_group(
    locations: Sequence[ActorLocation], num_replicas: int, gpus_per_replica: int,
    env: Callable[[int], Mapping[str, str]], deaths: tuple[type[Exception], ...] = (),
) -> RayWorkerGroup:  # fmt: skip
    """Create one actor per engine; `locations` are the ranks' or those of `engine_gpu_locations`.

    Replica i gets the GPUs of `gpus_per_replica` locations from `i * gpus_per_replica` on; with 0,
    on CPU, replicas are distributed round-robin over the nodes. `env` returns the environment
    variables of replica i; `deaths`: see RayWorkerGroup.
    """
    options = []
    node_firsts = first_index_per_node(locations)
    for replica in range(num_replicas):
        if gpus_per_replica:
            first = replica * gpus_per_replica
        else:
            first = node_firsts[replica % len(node_firsts)]
        gpu_locations = locations[first : first + gpus_per_replica]
        variables = dict(env(replica))
        if gpu_locations:
            devices = ",".join(gpu for location in gpu_locations for gpu in location.gpu_ids)
            variables |= {**KEEP_VISIBLE_DEVICES, "CUDA_VISIBLE_DEVICES": devices}
        node = NodeAffinitySchedulingStrategy(locations[first].node_id, soft=False)
        options.append(
            ActorHost.options(  # type: ignore[attr-defined]  # Ray's decorator adds it
                num_cpus=0,
                max_concurrency=1000,
                runtime_env={"env_vars": variables},
                scheduling_strategy=node,
            )
        )
    return RayWorkerGroup(options, "rollout replica", ReplicaLost, None, deaths)
