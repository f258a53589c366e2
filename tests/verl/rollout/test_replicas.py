"""The hand-over of weights: what it says of itself, and what happens around it, in which order."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

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
from verl.single_controller.restarts import Restarts
from verl.trainer.ray_trainer import RayPPOTrainer


class SlowEngines(RolloutReplicas):
    """Engines that need a while for what they are asked."""

    def _ask(self, method: str, arguments: Sequence[Sequence[Any]] | None = None) -> list[Any]:
        if method == "engine.update_weights":
            time.sleep(0.03)
        return ["float32"]

    def _present(self) -> list[tuple[str, int, bool]]:
        return []


class SlowRanks:
    """Ranks that say how much of their while they wrote."""

    def share_policy(self, directory: Path, dtype: str, is_adapter: bool) -> float:
        time.sleep(0.02)
        return 0.005


def test_the_parts_of_a_hand_over_add_up_to_it() -> None:
    """Ranks gather and write, then engines load; nothing is counted twice."""
    engines = SlowEngines([], [], Restarts(0))  # type: ignore[arg-type]
    for engines.takes_adapter in (False, True):
        start = time.perf_counter()
        parts = engines.update_weights(SlowRanks())
        whole = time.perf_counter() - start
        assert set(parts) == {"gather", "write", "load"}
        assert parts["write"] == 0.005
        assert parts["gather"] >= 0.015 and parts["load"] >= 0.03
        assert whole - 0.01 < sum(parts.values()) <= whole


class OneReplica(RolloutReplicas):
    """The trainer's side, over a single replica that answers at once."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.fake = log, RecordingReplicas(log)
        super().__init__(["replica 0"], [()], Restarts(0),
                         empty_cache=lambda: log.append("empty_cache"))  # fmt: skip

    def _present(self) -> list[tuple[str, int, bool]]:
        return [("here", self.version, False)]

    def _ask(self, method: str, arguments: Sequence[Sequence[Any]] | None = None) -> list[Any]:
        if method == "dtype":
            return ["float32"]
        if method == "rollout":
            return [self.fake.generate(*arguments[0])]
        self.log.append(method)
        return [None]


class Calls:
    """A group that notes how it is taken down."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def last_call(self, method: str) -> None:
        self.log.append(method)

    def shutdown(self) -> None:
        self.log.append("kill")


@pytest.mark.parametrize("ended_by", [None, RankLost, KeyboardInterrupt])
def test_who_presses_ctrl_c_twice_does_not_wait_for_busy_engines(ended_by: Any) -> None:
    """They are killed; whatever else ends a run, they are first asked to end in good order."""
    engines = SlowEngines(Calls(), [], Restarts(0))  # type: ignore[arg-type]
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
    """Ranks that note the hand-over."""

    def share_policy(self, directory: Path, dtype: str, is_adapter: bool) -> float:
        self.log.append("share_policy")
        return 0.0


def test_ranks_empty_their_cache_once_a_step_before_the_engines_wake(tmp_path: Path) -> None:
    """After the last update and before the engines take their share; not after every pass."""
    config, log = Config(), []
    config.trainer.default_local_dir = str(tmp_path)
    config.actor_rollout_ref.model.path = str(tmp_path)
    config.trainer.save_freq, config.trainer.test_freq = 0, 0
    config.trainer.val_before_train = False
    config.trainer.guard.drift_trajectories = 0
    config.data.train_batch_size = 4
    config.actor_rollout_ref.rollout.n_agent = 3
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 6
    config.algorithm.adv_estimator = "grpo"
    trainer = RayPPOTrainer(
        config, HandingRanks(log), OneReplica(log), prompts(8), prompts(4), score_by_sample,
        FixedKLController(0.0), Tracking("p", "e", [], str(tmp_path)), total_steps=2,
    )  # fmt: skip
    trainer.fit()
    update = ["empty_cache", "engine.wake_up", "share_policy", "engine.update_weights"]
    look_back = ["generate", "engine.sleep", "log_probs", "ref_log_probs"]
    step = [*look_back, "update_actor", "update_actor", *update]
    assert log == [*update, *step, *step]
