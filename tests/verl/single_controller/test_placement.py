"""Placement of ranks and engines on (logical) GPUs: visible devices and numbers of threads."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import ray

from verl.ext.cpu_env import gpu_env
from verl.ext.restart import replace_actors
from verl.single_controller.actors import RayWorkerGroup
from verl.single_controller.placement import (
    create_rollout_group,
    create_trainer_group,
    nodes_of,
    reserve,
)
from verl.trainer.cluster import JOB_CONFIG

pytestmark = pytest.mark.pretend_cuda
KEPT = ("2", "3", "0", "1")
"""The user's CUDA_VISIBLE_DEVICES, not in ascending order."""
CORES, RANKS = 14, 4
Seen = tuple[str, str]


def seen_by(group: RayWorkerGroup) -> list[Seen]:
    """Return visible devices and threads of each actor; they host the module `os` to load fast."""
    group.gather(group.start_build(importlib.import_module, [("os",)] * len(group)))
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    return list(zip(*(group.call("getenv", name) for name in names), strict=True))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RayWorkerGroup]:
    """Four ranks on a node of four logical GPUs, as `build_groups` creates them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(KEPT))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")  # as a user's shell may
        patch.delenv("OMP_NUM_THREADS", raising=False)
        ray.init(
            "local", include_dashboard=False, num_cpus=CORES, num_gpus=RANKS, logging_level="error"
        )
        placement = reserve(RANKS, 1, use_gpu=True, timeout_s=60)
        env = gpu_env(nodes_of(placement), RANKS)
        group = create_trainer_group(placement, RANKS, use_gpu=True, env=env)
        yield group
        group.shutdown()
        ray.shutdown()


def test_each_rank_has_its_own_gpu_and_its_share_of_the_cores(ranks: RayWorkerGroup) -> None:
    """All visible GPUs are used once; Ray alone would set one thread."""
    seen = seen_by(ranks)
    assert sorted(gpu for gpu, _ in seen) == sorted(KEPT)
    assert [location.gpu_ids for location in ranks.locations()] == [(gpu,) for gpu, _ in seen]
    assert {threads for _, threads in seen} == {str(CORES // RANKS)}


def test_an_engine_sees_the_gpus_of_its_ranks(ranks: RayWorkerGroup) -> None:
    """GPUs are in the ranks' order, for each tensor parallel size, and after a restart."""
    gpus = [gpu for location in ranks.locations() for gpu in location.gpu_ids]
    env = {"OMP_NUM_THREADS": "5"}
    groups = {  # all before the first use, so that they start in parallel
        size: create_rollout_group(ranks.locations(), count, size, lambda i: env)
        for size, count in {1: 1, 2: 2, 4: 1}.items()
    }
    try:
        for size, engines in groups.items():
            seen = [",".join(gpus[i * size : (i + 1) * size]) for i in range(len(engines))]
            assert seen_by(engines) == [(devices, "5") for devices in seen]
        replace_actors(groups[4], None)
        assert seen_by(groups[4]) == [(",".join(gpus), "5")]
    finally:
        for engines in groups.values():
            engines.shutdown()


def test_the_users_number_of_threads_takes_precedence(ranks: RayWorkerGroup) -> None:
    """But not the 1 that Ray itself sets in the driver of a job; there is at least one thread."""
    nodes = [node["NodeID"] for node in ray.nodes()]
    for environment, expected in (
        ({"OMP_NUM_THREADS": "6"}, "6"),
        ({"OMP_NUM_THREADS": "1"}, "1"),
        ({"OMP_NUM_THREADS": "1", JOB_CONFIG: "{}"}, "3"),
        ({}, "3"),
    ):
        assert gpu_env(nodes, RANKS, environment) == {"OMP_NUM_THREADS": expected}
    assert gpu_env(nodes, CORES + 1, {}) == {"OMP_NUM_THREADS": "1"}
