"""How a run's processes are placed and started."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.verl.trainer.test_ranks import FakeGroup
from verl.config import Config
from verl.errors import ConfigError
from verl.preflight.memory.check import with_options
from verl.single_controller.actors import ActorLocation, Restarts
from verl.trainer import groups
from verl.trainer.groups import check_engine_gpus


class Built(Exception):
    """Raised when the nodes' watchdogs are started."""


def group_on(
    nodes: str, guarded: list[tuple[str, str]], gather: Callable[[Sequence[Any]], Any] = list,
    name: str = "rank",
) -> Any:  # fmt: skip
    """Return a group with an actor on each of `nodes`, which records the watchdogs it starts."""

    def host(rank: int) -> SimpleNamespace:
        reaper = SimpleNamespace(remote=lambda mark: guarded.append((f"{name} {rank}", mark)))
        return SimpleNamespace(start_reaper=reaper)

    locations = [ActorLocation(node, "host", ()) for node in nodes]
    hosts = [host(rank) for rank in range(len(nodes))]
    return SimpleNamespace(locations=lambda: locations, hosts=hosts, gather=gather)


def test_each_node_but_the_drivers_gets_its_own_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """One per node, started by its first rank before anything is built; the driver has one."""
    guarded: list[tuple[str, str]] = []

    def gather(calls: Sequence[Any]) -> None:
        raise Built

    group = group_on("aabbc", guarded, gather)
    context = SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setattr(groups.ray, "get_runtime_context", lambda: context)
    for name, answer in {"reserve": None, "nodes_of": {}, "check_nodes": None,
                         "create_trainer_group": group}.items():  # fmt: skip
        monkeypatch.setattr(groups, name, lambda *_, answer=answer: answer)
    config = Config()
    config.trainer.device = "cpu"
    reaper = SimpleNamespace(mark="mark")
    with pytest.raises(Built):
        groups.build_groups(config, lambda _: None, lambda _: None, 1, reaper, Restarts(0))
    assert guarded == [("rank 2", "mark"), ("rank 4", "mark")]


def test_a_node_of_both_groups_has_one_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """The critic's ranks start one only on nodes without ranks of the actor."""
    guarded: list[tuple[str, str]] = []
    context = SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setattr(groups.ray, "get_runtime_context", lambda: context)
    critic = group_on("abbcc", guarded, name="critic rank")
    groups.start_node_reapers([group_on("abb", guarded), critic], "mark")
    assert guarded == [("rank 1", "mark"), ("critic rank 3", "mark")]


@pytest.mark.parametrize(("use_gpu", "per_replica", "replicas"), [(True, 2, 2), (False, 0, 1)])
def test_an_engine_gets_as_many_gpus_as_its_tensor_parallel_size(
    use_gpu: bool, per_replica: int, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU, engines get no GPUs, and there is one engine per node."""

    class Placed(Exception):
        """Raised instead of building the engines."""

    def create_rollout_group(locations: object, number: int, gpus: int, *_: object) -> None:
        raise Placed(number, gpus)

    config = Config()
    config.trainer.n_gpus_per_node = 4
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    for name, answer in {
        "uses_gpus": use_gpu, "config_for_actors": config, "reserve": None, "nodes_of": {},
        "check_nodes": None, "start_node_reapers": None, "gpu_env": {},
        "create_trainer_group": FakeGroup(["rank"]),
    }.items():  # fmt: skip
        monkeypatch.setattr(groups, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(groups, "create_rollout_group", create_rollout_group)
    with pytest.raises(Placed) as placed:
        groups.build_groups(config, None, None, 1, SimpleNamespace(mark="m"), None)  # type: ignore[arg-type]
    assert placed.value.args == (replicas, per_replica)


@pytest.mark.parametrize(("rollout_gpus", "max_engines"), [(0, 4), (2, 2)])
def test_more_engines_than_fit_on_the_gpus_are_refused(
    rollout_gpus: int, max_engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is placed, also if the device is `auto`."""

    class Reserved(Exception):
        """Raised if no problem was found."""

    def reserve(*_: object) -> None:
        raise Reserved

    config = Config()
    config.trainer.n_gpus_per_node, config.trainer.nnodes = 4, 2
    config.trainer.rollout_gpus = rollout_gpus
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    monkeypatch.setattr(groups, "uses_gpus", lambda config: True)
    monkeypatch.setattr(groups, "reserve", reserve)
    reaper: Any = SimpleNamespace(mark="m")
    for number, error in ((max_engines, Reserved), (max_engines + 1, ConfigError)):
        config.actor_rollout_ref.rollout.num_replicas = number
        message = None if error is Reserved else f"at most {max_engines}:"
        with pytest.raises(error, match=message):
            groups.build_groups(config, lambda _: None, lambda _: None, 1, reaper, Restarts(0))  # type: ignore[arg-type, return-value]


def test_engines_that_share_gpus_cannot_sample_ahead_of_time() -> None:
    """They sleep while the ranks train; on CPU, or on their own GPUs, they do not."""
    config = Config()
    config.actor_rollout_ref.rollout.max_staleness = 2
    with pytest.raises(ConfigError, match=r"got 2, expected 0: engines share.*rollout_gpus=N"):
        check_engine_gpus(config, use_gpu=True)
    check_engine_gpus(config, use_gpu=False)
    config.trainer.rollout_gpus = 1
    check_engine_gpus(config, use_gpu=True)
    config.trainer.rollout_gpus = 0
    config.actor_rollout_ref.rollout.url = ["http://a:1"]  # a server has its own GPUs
    check_engine_gpus(config, use_gpu=True)


@pytest.mark.parametrize(
    ("change", "spins"),
    [
        ({}, groups.SPIN_COUNT),
        ({"actor_rollout_ref.rollout.max_staleness": 1}, "0"),
        (
            {"actor_rollout_ref.rollout.max_staleness": 1, "trainer.rollout_gpus": 1},
            groups.SPIN_COUNT,
        ),
        ({"actor_rollout_ref.rollout.num_replicas": 2}, "0"),
        ({"critic.n_gpus_per_node": 1}, "0"),
        ({"trainer.n_gpus_per_node": 2}, "0"),
        ({"trainer.n_gpus_per_node": 1, "trainer.nnodes": 2}, groups.SPIN_COUNT),
    ],
    ids=str,
)
def test_threads_spin_unless_processes_share_cores(
    change: dict[str, Any], spins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks and engines that take turns, or have other cores; a user's setting takes precedence."""
    config = with_options(Config(), {"trainer.n_gpus_per_node": 1, **change})
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert groups.cpu_env(groups._shares_cores(config))["GOMP_SPINCOUNT"] == spins
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert groups.cpu_env(groups._shares_cores(config))["GOMP_SPINCOUNT"] == "7"


IN_A_THREAD = """
import resource
import threading
import torch

def new_pages():
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    kept = [torch.ones(1 << 20) for _ in range(32)]
    torch.ones(1 << 25)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

thread = threading.Thread(target=lambda: print(*(new_pages() for _ in range(10))))
torch.set_num_threads(1)
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the variables are glibc's")
def test_a_thread_touches_pages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray calls actors in a thread, for which glibc would create a separate arena."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    env = os.environ | groups.cpu_env()
    command = [sys.executable, "-c", IN_A_THREAD]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert min(map(int, done.stdout.split())) < 100
