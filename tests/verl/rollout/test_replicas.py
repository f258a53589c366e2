"""The transfer of weights to the replicas: its order, and its reported times."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.verl.rollout.local_group import LocalGroup
from tests.verl.trainer.recording import (
    RecordingRanks,
    RecordingReplicas,
    prompts,
    score_by_sample,
)
from verl.config import Config
from verl.core_algos.kl import FixedKLController
from verl.errors import RankLost
from verl.monitor.tracking import Tracking
from verl.rollout.replicas import RolloutReplicas
from verl.single_controller.actors import ActorLocation
from verl.trainer.build import Inputs, Parts
from verl.types import Sampling, Trajectory
from verl.weights.files import Files


class FakeReplica:
    """A replica that records the calls to it and its engine, and samples nothing."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.fake, self.engine = log, RecordingReplicas(log), self

    def dtype(self) -> str:
        return "float32"

    def rollout(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        return self.fake.generate(starts, sampling)

    async def update_weights(self, folder: str, version: int, scored_ids: Sequence[int]) -> None:
        self.log.append("update_weights")
        await asyncio.sleep(0.03)

    async def probe(self) -> None: ...

    def busy_share(self) -> float:
        return 0.5

    def sleep(self) -> None:
        self.log.append("engine.sleep")

    def wake_up(self) -> None:
        self.log.append("engine.wake_up")


def one_replica(log: list[str]) -> RolloutReplicas:
    """Return the trainer's side of a single replica."""
    group: Any = LocalGroup([FakeReplica(log)])  # type: ignore[list-item]
    empty_cache = lambda: log.append("empty_cache")  # noqa: E731 - one expression
    return RolloutReplicas(group, Files(Config()), empty_cache)


class SlowRanks:
    """A group of one rank that takes 20 ms, of which it reports 5 ms for writing."""

    def __init__(self) -> None:
        self.group: Any = self

    def locations(self) -> list[ActorLocation]:
        return [ActorLocation("here", "localhost", ())]

    def scatter(self, method: str, shards: Sequence[Any], *arguments: Any) -> list[float]:
        assert method == "sender.write"
        time.sleep(0.02)
        return [0.005]


def test_the_phases_of_a_weight_transfer_add_up() -> None:
    """Ranks gather and write, then engines load; no time is counted twice."""
    engines = one_replica([])
    start = time.perf_counter()
    parts = engines.update_weights(SlowRanks(), 1)
    whole = time.perf_counter() - start
    assert set(parts) == {"wait", "gather", "write", "load"}
    assert parts["write"] == 0.005 and parts["wait"] < 0.01
    assert parts["gather"] >= 0.014 and parts["load"] >= 0.029
    assert whole - 0.01 < sum(parts.values()) <= whole


class Calls:
    """A group that records how it is shut down."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def shutdown(self, method: str | None = None) -> None:
        self.log += [*filter(None, [method]), "kill"]


@pytest.mark.parametrize("ended_by", [None, RankLost, KeyboardInterrupt])
def test_ctrl_c_does_not_wait_for_busy_engines(ended_by: Any) -> None:
    """Engines are killed; after any other end of a run, `shutdown` is called first."""
    engines = one_replica([])
    engines.group = Calls()  # type: ignore[assignment]
    with contextlib.suppress(RankLost, KeyboardInterrupt):
        try:
            if ended_by is not None:
                raise ended_by
        finally:
            engines.shutdown()
    assert engines.group.log == [  # type: ignore[attr-defined]
        *(["engine.shutdown"] if ended_by is not KeyboardInterrupt else []), "kill"
    ]  # fmt: skip


class HandingRanks(RecordingRanks):
    """Ranks that record the weight transfer."""

    def locations(self) -> list[ActorLocation]:
        return [ActorLocation("here", "localhost", ())]

    def scatter(self, method: str, shards: Sequence[Any], *arguments: Any) -> list[float]:
        self.log.append(method)
        return [0.0]


def test_ranks_empty_their_cache_once_a_step_before_the_engines_wake(tmp_path: Path) -> None:
    """After the last update and before the engines allocate memory; not after every pass."""
    config, log = Config(), []
    config.trainer.default_local_dir = str(tmp_path)
    config.actor_rollout_ref.model.path = str(tmp_path)
    config.trainer.save_freq, config.trainer.test_freq = 0, 0
    config.trainer.val_before_train = False
    config.trainer.guard.action = "off"
    config.data.train_batch_size = 4
    config.actor_rollout_ref.rollout.n_agent = 3
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 6
    config.algorithm.adv_estimator = "grpo"
    config.trainer.canary = False
    trainer = Parts(
        Inputs(config, prompts(8), prompts(4), total_steps=2), HandingRanks(log), one_replica(log),
        score_by_sample, FixedKLController(0.0), Tracking("p", "e", [], str(tmp_path)),
    ).build()  # fmt: skip
    trainer.fit()
    update = ["empty_cache", "engine.wake_up", "sender.write", "update_weights"]
    look_back = ["generate", "engine.sleep", "log_probs", "ref_log_probs"]
    step = [*look_back, "update_actor", "update_actor", *update]
    assert log == [*update, *step, *step]
