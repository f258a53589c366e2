"""Processes of real runs are killed, and the runs continue as if nothing had happened.

No fakes for what is killed: Ray's actors, the engines and the ranks are those of a real run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from example.tiny import tiny_model
from verl.config import Config
from verl.errors import RankLost, ReplicaLost
from verl.ext.cpu_env import cpu_env
from verl.ext.reaper import MARK, REPLICA_MARK, OrphanReaper, find_marked, kill_leftovers
from verl.ext.restart import RestartingReplicas, Restarts
from verl.rollout.interface import EngineDied, RolloutEngine
from verl.rollout.replica import RolloutReplica
from verl.rollout.replicas import RolloutReplicas
from verl.single_controller.actors import ActorLocation, RayWorkerGroup
from verl.single_controller.placement import create_rollout_group, create_trainer_group, reserve
from verl.types import Origin, Prompt, Sampling, Segment, Trajectory, start_trajectory
from verl.weights.files import Files
from verl.weights.node_folder import PREFIX, NodeFolder

pytestmark = [pytest.mark.slow, pytest.mark.vllm_cpu]

ROOT = Path(__file__).resolve().parent.parent
SAMPLING = Sampling(max_tokens=8)


def wait_until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    """Poll until a condition holds; fails the test if it does not hold in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.1)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process is still running; zombies are not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.fixture(scope="module")
def cluster() -> Iterator[OrphanReaper]:
    """Start a local Ray cluster, with the reaper that ends it."""
    with OrphanReaper() as reaper:
        ray.init("local", include_dashboard=False, num_cpus=4, logging_level="error")
        yield reaper
        ray.shutdown()


class Rank:
    """Replaces a training rank: waits for its peers, or fails, as a rank does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def meet(self, how: str) -> int:
        if self.rank == 1 and how == "peer first":
            time.sleep(1.0)
        if self.rank == 1 and how != "bug":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "peer first":
            raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer")
        if how == "bug" and self.rank == 1:
            raise ValueError("a bug")
        return time.sleep(600) or self.rank


@pytest.fixture
def ranks(cluster: OrphanReaper) -> Iterator[RayWorkerGroup]:
    """Two actors that host ranks."""
    env = cpu_env() | cluster.variables | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    group = create_trainer_group(reserve(2, 1, use_gpu=False), 2, use_gpu=False, env=env)
    group.locations()
    group.gather(group.start_build(Rank, [(0,), (1,)]))
    yield group
    group.shutdown()


@pytest.mark.parametrize("how", ["waits for ever", "peer first"])
def test_a_dead_rank_is_named_though_its_peers_wait_or_fail_first(
    ranks: RayWorkerGroup, how: str
) -> None:
    """The driver neither waits for the peers, nor names the rank whose error came first."""
    pid = ranks.locations()[1].pid
    with pytest.raises(RankLost, match=rf"rank 1 on node \S+ \(process {pid}\) is lost"):
        ranks.call("meet", how)


def test_a_bug_in_one_rank_is_not_a_lost_rank(ranks: RayWorkerGroup) -> None:
    """A bug ends the run with its own traceback, although the other rank waits for ever."""
    with pytest.raises(ValueError, match="a bug"):
        ranks.call("meet", "bug")


class GatedAgent:
    """Generates twice; after each turn it reports so by a file, and waits for the gate to open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def run(self, start: Trajectory, engine: RolloutEngine, sampling: Sampling) -> Trajectory:
        for turn in range(2):
            seeded = Sampling(8, sampling.temperature, seed=(start.seed or 0) + turn)
            completion = await engine.generate(start.ids, seeded)
            ids, log_probs = completion.ids, completion.log_probs
            start.segments.append(Segment(Origin.POLICY, ids, completion.text, log_probs))
            start.stats = {"version": completion.weight_version}
            (self.folder / f"waits-{start.group}").touch()
            while not (self.folder / "open").exists():
                await asyncio.sleep(0.05)
        return start


@dataclass
class Rollout:
    """Two replicas on a tiny model, and helpers to disturb them."""

    replicas: RestartingReplicas
    folder: Path
    weights: ModelFolder

    def starts(self) -> list[Trajectory]:
        prompts = [Prompt(f"p#{i}", (5 + i, 9, 17 + i), "test", ("x",)) for i in range(4)]
        return [start_trajectory(p, group=p.uid, seed=40 + i) for i, p in enumerate(prompts)]

    def generate(self) -> list[Trajectory]:
        return self.replicas.generate(self.starts(), SAMPLING)

    def gate(self, is_open: bool) -> None:
        for path in self.folder.glob("waits-*"):
            path.unlink()
        (self.folder / "open").touch() if is_open else (self.folder / "open").unlink()

    def disturbed(self, disturb: Callable[[], None]) -> list[Trajectory]:
        """Return the result if `disturb` is called after every dialogue's first turn."""
        self.gate(is_open=False)
        answers: list[list[Trajectory]] = []
        thread = threading.Thread(target=lambda: answers.append(self.generate()))
        thread.start()
        wait_until(lambda: len(list(self.folder.glob("waits-*"))) == 4)
        disturb()
        self.gate(is_open=True)
        thread.join()
        return answers[0]

    def actor(self, replica: int) -> psutil.Process:
        return psutil.Process(self.replicas.replicas.group.locations()[replica].pid)

    def engine_core(self, replica: int) -> psutil.Process:
        (core,) = [p for p in self.actor(replica).children() if "EngineCore" in p.name()
                   or "EngineCore" in " ".join(p.cmdline())]  # fmt: skip
        return core


class ModelFolder:
    """In place of the ranks of one node, which write the weights of a model folder."""

    def __init__(self, model: Path) -> None:
        self.model, self.group = model, self
        self._folder: NodeFolder | None = None

    def locations(self) -> list[ActorLocation]:
        return [ActorLocation(ray.get_runtime_context().get_node_id(), "localhost", ())]

    def scatter(self, method: str, folders: Sequence[str], version: int, *_: Any) -> list[float]:
        (here,) = map(Path, folders)
        if self._folder is None:
            self._folder = NodeFolder(here)
        shutil.copytree(self.model, here / str(version), dirs_exist_ok=True)
        return [0.0]

    def close(self) -> None:
        assert self._folder is not None
        self._folder.close()


def tiny_config(model: Path) -> Config:
    config = Config()
    config.actor_rollout_ref.model.path = str(model)
    config.actor_rollout_ref.rollout.dtype = "float32"
    config.actor_rollout_ref.rollout.cpu_kv_cache_gib = 1
    config.trainer.device = "cpu"
    config.data.max_prompt_length = 128
    config.data.max_response_length = 16
    return config


@pytest.fixture(scope="module")
def rollout(cluster: OrphanReaper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollout]:
    """Replicas that started with one model and then received the weights of another."""
    folder = tmp_path_factory.mktemp("gate")
    (folder / "open").touch()
    start, current = tiny_model(folder / "a", seed=0), tiny_model(folder / "b", seed=1)
    env = cpu_env() | cluster.variables | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    ranks = create_trainer_group(reserve(1, 1, use_gpu=False), 1, use_gpu=False, env=env)
    group = create_rollout_group(
        ranks.locations(), 2, 0, lambda i: env | {REPLICA_MARK: f"{cluster.mark}/{i}"},
        (EngineDied,),
    )  # fmt: skip
    group.locations()
    arguments = [(tiny_config(start), lambda _: GatedAgent(folder), i) for i in range(2)]
    group.gather(group.start_build(RolloutReplica, arguments))
    group.call("engine.start")
    replicas = RestartingReplicas(
        RolloutReplicas(group, Files(tiny_config(start))), Restarts(99), kill_leftovers, 30.0
    )
    weights = ModelFolder(current)
    replicas.update_weights(weights, 1)
    yield Rollout(replicas, folder, weights)
    weights.close()
    replicas.shutdown()
    ranks.shutdown()


def ids(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    return [t.ids for t in trajectories]


@pytest.mark.parametrize("victim", ["actor", "engine core"])
def test_a_replica_killed_while_generating_changes_nothing(rollout: Rollout, victim: str) -> None:
    """All engines restart and generate the same ids, with the current weights."""
    undisturbed = rollout.generate()
    before, core = rollout.replicas.restarts.of_replicas, rollout.engine_core(0)
    process = rollout.actor(0) if victim == "actor" else core
    disturbed = rollout.disturbed(process.kill)
    assert ids(disturbed) == ids(undisturbed)
    assert all(t.num_policy_tokens for t in undisturbed)
    assert {t.stats["version"] for t in disturbed} == {rollout.replicas.replicas.version}
    assert rollout.replicas.restarts.of_replicas == before + 1
    assert not is_alive(core)


def test_a_replica_that_hangs_is_replaced(rollout: Rollout) -> None:
    """A suspended engine does not answer probes, and is killed with its actor."""
    undisturbed, core = rollout.generate(), rollout.engine_core(1)
    assert ids(rollout.disturbed(core.suspend)) == ids(undisturbed)
    assert not is_alive(core)


def test_a_replica_killed_between_steps_gets_the_next_weights(rollout: Rollout) -> None:
    """Its death is noticed at the weight transfer; afterwards all replicas have the weights."""
    undisturbed, version = rollout.generate(), rollout.replicas.replicas.version
    rollout.engine_core(0).kill()
    rollout.actor(1).kill()
    rollout.replicas.wake_up()
    rollout.replicas.update_weights(rollout.weights, version + 1)
    again = rollout.generate()
    assert ids(again) == ids(undisturbed)
    assert {t.stats["version"] for t in again} == {version + 1}


def test_a_replica_lost_too_often_ends_the_run(rollout: Rollout) -> None:
    """Without restarts left, the error names the replica and its node."""
    rollout.replicas.restarts, kept = Restarts(0), rollout.replicas.restarts
    rollout.actor(0).kill()
    with pytest.raises(ReplicaLost, match=r"rollout replica 0 on node .*max_restarts=0"):
        rollout.generate()
    rollout.replicas.restarts = kept
    rollout.generate()


def environ(process: psutil.Process) -> dict[str, str]:
    """Return a process's environment; empty if it has just ended."""
    try:
        return process.environ()
    except psutil.Error:
        return {}


@dataclass
class Run:
    """A running process of main_ppo."""

    process: subprocess.Popen[str]
    out: Path

    def rows(self) -> list[dict[str, Any]]:
        path = self.out / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def mark(self) -> str:
        return next(mark for p in self.below() if (mark := environ(p).get(MARK)))

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def has(self, step: int) -> bool:
        assert self.process.poll() is None, self.log()
        return any(row["step"] >= step for row in self.rows())

    def actors(self, is_replica: bool) -> list[psutil.Process]:
        found = [p for p in self.below() if "ActorHost" in p.name()]
        return [p for p in found if (REPLICA_MARK in environ(p)) == is_replica]

    def log(self) -> str:
        return (self.out / "log").read_text()[-6000:]


def start(world: dict[str, str], out: Path, *options: str) -> Run:
    """Start main_ppo as a user does: GRPO, with a checkpoint at each step."""
    out.mkdir()
    command = [
        sys.executable, "-m", "verl.trainer.main_ppo",
        f"data.train_files={world['rows']}", f"data.val_files={world['rows']}",
        "data.train_batch_size=2", "data.val_batch_size=8", "data.max_start_length=128",
        "data.max_prompt_length=512", "data.max_response_length=12", "data.max_obs_length=192",
        f"actor_rollout_ref.model.path={world['model']}", "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n_agent=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.rollout.cpu_kv_cache_gib=1",
        "actor_rollout_ref.actor.entropy_coeff=1e-6", "trainer.n_gpus_per_node=2",
        "trainer.device=cpu", "trainer.compute_dtype=float32", "trainer.logger=[jsonl]",
        "trainer.save_freq=1", "trainer.test_freq=0", "trainer.val_before_train=false",
        f"trainer.default_local_dir={out}", f"retriever.url={world['url']}/retrieve",
        "retriever.topk=1", "template=short", "+max_turns=1", *options,
    ]  # fmt: skip
    with (out / "log").open("w") as log:
        return Run(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, text=True), out)


def test_two_runs_at_once_one_of_which_loses_everything(
    world: dict[str, str], tmp_path: Path
) -> None:
    """Both runs end; the one that lost a replica and a rank has equal metrics, each step once."""
    undisturbed = start(world, tmp_path / "undisturbed", "trainer.total_training_steps=6")
    disturbed = start(world, tmp_path / "disturbed", "trainer.total_training_steps=6")
    wait_until(lambda: disturbed.has(1))
    disturbed.actors(is_replica=True)[0].kill()
    wait_until(lambda: disturbed.has(3))
    disturbed.actors(is_replica=False)[1].kill()
    for run in (undisturbed, disturbed):
        assert run.process.wait(500) == 0, run.log()
    expected, got = undisturbed.rows(), disturbed.rows()
    assert [row["step"] for row in got] == [row["step"] for row in expected] == [1, 2, 3, 4, 5, 6]
    for row, other in zip(got, expected, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "response_length/mean",
                     "perf/total_num_tokens", "critic/score/mean"):  # fmt: skip
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    assert got[-1]["fault/replica_restarts"] == 1 and got[-1]["fault/run_restarts"] == 1
    assert "is lost" in disturbed.log() and "the run starts again from" in disturbed.log()


def memory_folders() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"{PREFIX}*")}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_of_a_killed_run_remains(
    world: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    """No process, and thus no port, and no shared memory, whatever signal ended the run."""
    before = memory_folders()
    run = start(world, tmp_path / "run", "trainer.total_training_steps=99")
    wait_until(lambda: run.has(1))
    mark, below = run.mark(), run.below()
    own = memory_folders() - before
    assert any("EngineCore" in p.name() for p in below) and own
    run.process.send_signal(number)
    run.process.wait(120)
    wait_until(lambda: not find_marked(MARK, mark), 60)
    wait_until(lambda: not own & memory_folders(), 60)
    wait_until(lambda: not any(is_alive(process) for process in below), 60)  # its watchdog too
