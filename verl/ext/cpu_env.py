"""Environment variables by which actors compute fast: threads, how they wait, memory of malloc."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import ray

from verl.config import Config
from verl.malloc import malloc_env
from verl.threads import SPIN_COUNT, spin_count
from verl.trainer.cluster import JOB_CONFIG
from verl.trainer.groups import StartUp


def add_to(start_up: StartUp) -> None:
    """Set the variables of all actors."""
    start_up.variables.append(compute_variables)


def compute_variables(config: Config, nodes: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the actors on these nodes, addresses by Ray's node id."""
    if config.trainer.device == "cuda":
        return gpu_env(nodes, config.placement.gpus_per_node)
    return cpu_env(shares_cores(config))


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


def shares_cores(config: Config) -> bool:
    """Whether several processes compute on the same cores at the same time."""
    rollout, plan = config.actor_rollout_ref.rollout, config.placement
    samples_while_training = rollout.max_staleness > 0 and not plan.is_split
    num_processes = max(plan.actor.num_ranks, plan.num_engines(on_gpu=False))
    return samples_while_training or len(plan.groups) > 1 or num_processes > plan.actor.num_nodes


def cpu_env(shares_cores: bool = False) -> dict[str, str]:
    """Return the environment variables of actors that compute on the CPU.

    Threads: all cores, where Ray would set one thread. Idle threads spin for some ten microseconds
    before they sleep, because a layer consists of a dozen small operations, and waking a thread for
    each takes longer than the operation (docs/evidence/updates.md). With `shares_cores`, they sleep
    at once. The user's own GOMP_SPINCOUNT takes precedence.

    Memory: see `verl.malloc`.
    """
    return {
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "GOMP_SPINCOUNT": spin_count("0" if shares_cores else SPIN_COUNT),
        **malloc_env(),
    }
