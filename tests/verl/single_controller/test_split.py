"""Engines on their own GPUs, on two nodes of logical GPUs: no GPU is used twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.verl.single_controller.split_parts import Rank, Replica
from verl.config import Config
from verl.single_controller import placement
from verl.single_controller.actors import ActorLocation, RayWorkerGroup
from verl.trainer import groups

NODES, RANKS, OWN, CRITIC = 2, 1, 2, 1
"""Number of nodes, and on each node GPUs of the actor's ranks, engines and critic's ranks."""


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start Ray with two nodes of logical GPUs."""
    cards = RANKS + OWN + CRITIC
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(cards))))
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # Even with usage reports off, Ray reports that they are off.
    monkeypatch.setenv("RAY_USAGE_STATS_REPORT_URL", "http://127.0.0.1:9/")
    node = {"num_cpus": cards, "num_gpus": cards, "object_store_memory": 80 << 20}
    head = {**node, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(**node)
    ray.init(address=cluster.address, logging_level="error")
    yield
    ray.shutdown()
    cluster.shutdown()


def users(group: RayWorkerGroup) -> list[tuple[str, str]]:
    """Return node and GPU of each use by the group."""
    pairs = zip(group.locations(), group.call("cards"), strict=True)
    return [(location.node_id, card) for location, cards in pairs for card in cards]


@pytest.mark.slow
@pytest.mark.pretend_cuda
def test_no_gpu_is_used_by_a_rank_and_an_engine(
    two_nodes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each GPU has one user, an engine's GPUs are on one node, and all load concurrently."""
    config = Config()
    config.trainer.device, config.trainer.nnodes = "cuda", NODES
    config.trainer.n_gpus_per_node, config.trainer.rollout_gpus = RANKS, OWN
    config.critic.n_gpus_per_node = CRITIC
    config.trainer.default_local_dir = str(tmp_path)
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    monkeypatch.setattr(groups, "TrainerWorker", Rank)
    arguments: Any = (lambda _: None, 1, groups.StartUp(), Replica)
    ranks, replicas = groups.build_groups(config, *arguments)
    try:
        all_gpus = [(node["NodeID"], str(card)) for node in ray.nodes() for card in range(4)]
        used = [user for group in (*ranks.groups, replicas.group) for user in users(group)]
        assert Counter(used) == Counter(all_gpus)
        for group in ranks.groups:
            assert group.call("facts") == [(0, 2, 1), (1, 2, 1)]
        assert [len(cards) for cards in replicas.group.call("cards")] == [2, 2]
        # Inside one, vLLM would start its tensor-parallel workers as Ray actors on the ranks' GPUs.
        assert replicas.group.call("is_in_placement_group") == [False, False]
        replicas.wake_up()
        replicas.sleep()
    finally:
        replicas.group.shutdown()
        ranks.shutdown()


@pytest.mark.parametrize(("size", "devices"), [(1, ["6", "7", "4", "5"]), (2, ["6,7", "4,5"])])
def test_an_engine_is_within_one_node(
    size: int, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine has `size` of the engines' own GPUs on one node."""
    actor_options: list[dict[str, Any]] = []
    host = SimpleNamespace(options=lambda **options: actor_options.append(options))
    monkeypatch.setattr(placement, "ActorHost", host)
    monkeypatch.setattr(placement, "RayWorkerGroup", lambda *_, **__: None)
    ids = {"a" * 56: ("6", "7"), "b" * 56: ("4", "5")}
    locations = [ActorLocation(node, "host", (gpu,)) for node, gpus in ids.items() for gpu in gpus]
    placement.create_rollout_group(locations, 4 // size, size, lambda i: {})
    seen = [o["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] for o in actor_options]
    nodes = [o["scheduling_strategy"].node_id for o in actor_options]
    assert (seen, nodes) == (devices, sorted(nodes)) and len(set(nodes)) == 2
