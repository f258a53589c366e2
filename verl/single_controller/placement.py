"""Where the actors of a run go: room for the training ranks, engines beside them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
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
from verl.single_controller.actors import ActorHost, Place, RayWorkerGroup, here
from verl.single_controller.reaper import KEEP_ENVIRONMENT, MARK, PART

logger = logging.getLogger(__name__)

NOTICE_S = 20.0
"""Seconds between two lines of a run that waits for nodes."""
KEEP_VISIBLE_DEVICES = {
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Tell Ray to leave CUDA_VISIBLE_DEVICES as we set it for actors that share GPUs with others."""
SET_VISIBLE_DEVICES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "0"}
"""Have Ray show a rank its own GPU alone, though other trainers' users export the opposite."""
MARKED = {KEEP_ENVIRONMENT: "1"}
"""Keeps the mark of what actors start readable; below a user's own Ray they do not inherit it."""


def reserve(
    num_ranks: int, num_nodes: int, use_gpu: bool, timeout_s: float = 120.0, engine_gpus: int = 0
) -> PlacementGroup:
    """Room for the training ranks on `num_nodes` nodes; waits for nodes that are not there yet.

    `engine_gpus` more of each node are for engines alone (`gpus_beside`). Raises ResourceError when
    the cluster can't place them within `timeout_s`.
    """
    per_node = num_ranks // num_nodes
    bundle = {"CPU": float(per_node), **({"GPU": float(per_node + engine_gpus)} if use_gpu else {})}
    spread = "STRICT_SPREAD" if num_nodes > 1 else "STRICT_PACK"
    placement: PlacementGroup = placement_group([bundle] * num_nodes, strategy=spread)
    wanted = f"{num_nodes} x {bundle}"
    end = time.monotonic() + timeout_s
    while not placement.wait(max(0.0, min(NOTICE_S, end - time.monotonic()))):
        if time.monotonic() < end:
            logger.warning("waiting for %s in the Ray cluster: %s", wanted, describe_nodes())
            continue
        remove_placement_group(placement)
        raise ResourceError(
            f"the Ray cluster could not place {wanted} in {timeout_s:.0f} s: {describe_nodes()}; "
            "add nodes (docs/multinode.md), lower trainer.n_gpus_per_node, trainer.rollout_gpus, "
            "critic.n_gpus_per_node or trainer.nnodes, or wait longer with trainer.node_timeout"
        )
    return placement


def describe_nodes() -> str:
    """The cluster's nodes with what each has, and those that were lost."""
    lines = []
    for node in ray.nodes():
        kinds = {kind: node["Resources"].get(kind, 0.0) for kind in ("CPU", "GPU")}
        state = ", ".join(f"{n:.0f} {kind}" for kind, n in kinds.items() if n or kind == "CPU")
        lines.append(f"{node['NodeManagerAddress']} ({state if node['Alive'] else 'lost'})")
    return f"{len(lines)} node(s), " + ", ".join(lines)


def nodes_of(placement: PlacementGroup) -> dict[str, str]:
    """Address of each node where a placement lies, by the node's id."""
    ids = placement_group_table(placement)["bundles_to_node_id"].values()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return {node_id: addresses[node_id] for node_id in ids}


def create_trainer_group(
    placement: PlacementGroup, num_ranks: int, use_gpu: bool, env: Mapping[str, str],
    name: str = "rank",
) -> RayWorkerGroup:  # fmt: skip
    """One actor per training rank in what was reserved, in order; a GPU each if `use_gpu`.

    `name`: what users call one of them.
    """
    per_node = num_ranks // placement.bundle_count
    options = [
        ActorHost.options(  # type: ignore[attr-defined]  # Ray's decorator adds it
            num_cpus=1,
            num_gpus=1 if use_gpu else 0,
            runtime_env={"env_vars": {**env, **MARKED, **SET_VISIBLE_DEVICES}},
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement, rank // per_node),
        )
        for rank in range(num_ranks)
    ]
    return RayWorkerGroup(options, name, RankLost, placement)


def gpus_beside(placement: PlacementGroup, engine_gpus: int) -> list[Place]:
    """A place for each GPU that was reserved for engines, node by node.

    Ask when every rank has its own: these are the ones that are left. Engines themselves stay out
    of the placement group, for vLLM would start workers of its own in one that it finds itself in.
    """
    nodes = (PlacementGroupSchedulingStrategy(placement, i) for i in range(placement.bundle_count))
    looks = (
        ray.remote(here).options(num_cpus=0, num_gpus=engine_gpus, scheduling_strategy=node)
        for node in nodes
    )
    tasks = [look.remote() for look in looks]
    return [replace(place, gpu_ids=(gpu,)) for place in ray.get(tasks) for gpu in place.gpu_ids]


def first_of_nodes(places: Sequence[Place]) -> list[int]:
    """The first actor of each node."""
    nodes = [place.node_id for place in places]
    return [nodes.index(node) for node in dict.fromkeys(nodes)]


def create_rollout_group(
    places: Sequence[Place], num_replicas: int, gpus_per_replica: int, env: Mapping[str, str],
    deaths: tuple[type[Exception], ...] = (),
) -> RayWorkerGroup:  # fmt: skip
    """One actor per engine, on the GPUs of `places`: the ranks', or those of `gpus_beside`.

    `deaths`: see RayWorkerGroup. Replica i has the GPUs of the places `i * gpus_per_replica ...`;
    without GPUs (`gpus_per_replica` 0) replicas go round the ranks' nodes.
    """
    options = []
    firsts = first_of_nodes(places)
    for replica in range(num_replicas):
        first = replica * gpus_per_replica if gpus_per_replica else firsts[replica % len(firsts)]
        shared = places[first : first + gpus_per_replica]
        variables = {**env, **MARKED, PART: f"{env[MARK]}/replica-{replica}"}
        if shared:
            devices = ",".join(gpu for place in shared for gpu in place.gpu_ids)
            variables |= {**KEEP_VISIBLE_DEVICES, "CUDA_VISIBLE_DEVICES": devices}
        node = NodeAffinitySchedulingStrategy(places[first].node_id, soft=False)
        options.append(
            ActorHost.options(  # type: ignore[attr-defined]  # Ray's decorator adds it
                num_cpus=0,
                max_concurrency=1000,
                runtime_env={"env_vars": variables},
                scheduling_strategy=node,
            )
        )
    return RayWorkerGroup(options, "rollout replica", ReplicaLost, deaths=deaths)
