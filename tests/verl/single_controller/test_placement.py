"""Where ranks and engines land on GPUs, which they see and with how many threads: logical GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import ray

from verl.single_controller.actors import RayWorkerGroup
from verl.single_controller.placement import (
    create_rollout_group,
    create_trainer_group,
    nodes_of,
    reserve,
)
from verl.single_controller.reaper import KEEP_ENVIRONMENT, MARK
from verl.trainer.cluster import JOB_CONFIG
from verl.trainer.groups import gpu_env

pytestmark = pytest.mark.pretend_cuda
KEPT = ("2", "3", "0", "1")
"""The user's CUDA_VISIBLE_DEVICES, in an order of their own."""
CORES, RANKS = 14, 4
Seen = tuple[str, str]


def look(group: RayWorkerGroup) -> list[Seen]:
    """What each actor finds in its environment; it hosts the module `os`, so that it loads fast."""
    group.gather(group.start_build(importlib.import_module, [("os",)] * len(group)))
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    return list(zip(*(group.call("getenv", name) for name in names), strict=True))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RayWorkerGroup]:
    """Four ranks on a node of four logical GPUs, as `build_groups` makes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(KEPT))
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")  # as a user's shell may
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.delenv(KEEP_ENVIRONMENT, raising=False)
        ray.init(
            "local", include_dashboard=False, num_cpus=CORES, num_gpus=RANKS, logging_level="error"
        )
        placement = reserve(RANKS, 1, use_gpu=True, timeout_s=60)
        env = {MARK: "test", **gpu_env(nodes_of(placement), RANKS)}
        group = create_trainer_group(placement, RANKS, use_gpu=True, env=env)
        yield group
        group.shutdown()
        ray.shutdown()


def test_each_rank_has_a_gpu_of_its_own_and_its_share_of_the_cores(ranks: RayWorkerGroup) -> None:
    """All that the user left visible, each once; Ray alone would give one thread."""
    seen = look(ranks)
    assert sorted(gpu for gpu, _ in seen) == sorted(KEPT)
    assert [location.gpu_ids for location in ranks.locations()] == [(gpu,) for gpu, _ in seen]
    assert {threads for _, threads in seen} == {str(CORES // RANKS)}


def test_an_engine_sees_the_gpus_of_its_ranks(ranks: RayWorkerGroup) -> None:
    """In the ranks' order, for each tensor parallel size; its successor after a death too."""
    env = {MARK: "test", "OMP_NUM_THREADS": "5"}
    gpus = [gpu for location in ranks.locations() for gpu in location.gpu_ids]
    groups = {  # all at once: they start side by side
        size: create_rollout_group(ranks.locations(), count, size, env)
        for size, count in {1: 1, 2: 2, 4: 1}.items()
    }
    try:
        for size, engines in groups.items():
            seen = [",".join(gpus[i * size : (i + 1) * size]) for i in range(len(engines))]
            assert look(engines) == [(devices, "5") for devices in seen]
        groups[4].restart()
        assert look(groups[4]) == [(",".join(gpus), "5")]
    finally:
        for engines in groups.values():
            engines.shutdown()


def test_what_actors_start_keeps_its_mark(ranks: RayWorkerGroup) -> None:
    """Also below a Ray that the user started, which has nothing of the driver's environment: vLLM
    gives its processes titles, which are else written over the mark."""
    engines = create_rollout_group(ranks.locations(), 1, 1, {MARK: "test"})
    try:
        for group in (ranks, engines):
            look(group)
            assert set(group.call("getenv", KEEP_ENVIRONMENT)) == {"1"}
    finally:
        engines.shutdown()


def test_threads_are_the_users_where_the_user_says_so(ranks: RayWorkerGroup) -> None:
    """But Ray's own 1, in the driver of a job, is no wish; and nobody gets none."""
    nodes = [node["NodeID"] for node in ray.nodes()]
    for environment, expected in (
        ({"OMP_NUM_THREADS": "6"}, "6"),
        ({"OMP_NUM_THREADS": "1"}, "1"),
        ({"OMP_NUM_THREADS": "1", JOB_CONFIG: "{}"}, "3"),
        ({}, "3"),
    ):
        assert gpu_env(nodes, RANKS, environment) == {"OMP_NUM_THREADS": expected}
    assert gpu_env(nodes, CORES + 1, {}) == {"OMP_NUM_THREADS": "1"}
