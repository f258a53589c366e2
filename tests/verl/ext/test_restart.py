"""Lost replicas are replaced; after a lost rank a run starts again, from the right checkpoint."""

import asyncio
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import writing
from tests.verl.rollout.local_group import LocalGroup
from tests.verl.rollout.test_pool import Planned, hosts_of, make_starts
from verl.config import Config
from verl.errors import (
    CollapseError,
    ConfigError,
    Interrupted,
    RankLost,
    ReplicaLost,
    ToolOutage,
    UserError,
)
from verl.ext.restart import Restarts, supervised
from verl.rollout.replicas import RolloutReplicas
from verl.trainer.groups import StartUp
from verl.types import Sampling
from verl.weights.files import Files


class Script:
    """Scripted attempts: each saves steps until it raises an error; records `resume_mode`."""

    def __init__(self, root: Path, *actions: int | Exception) -> None:
        self.root, self.actions, self.resumed = root, list(actions), list[str]()

    def __call__(self, config: Config) -> None:
        self.resumed.append(config.trainer.resume_mode)
        while self.actions:
            action = self.actions.pop(0)
            if isinstance(action, Exception):
                raise action
            save(self.root, action)


def save(root: Path, step: int) -> None:
    with writing(root, step) as folder:
        (folder / "content").write_text("x")


def config_for(root: Path, resume_mode: str = "disable") -> Config:
    config = Config()
    config.trainer.default_local_dir = str(root)
    config.trainer.resume_mode = resume_mode
    return config


def test_a_lost_rank_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    """Even if resuming is disabled; after a second loss, from a later checkpoint."""
    script = Script(tmp_path, 1, 2, RankLost("rank 1"), 3, RankLost("rank 0"))
    Restarts(3).supervise(script, config_for(tmp_path))
    expected = ["disable", str(tmp_path / "global_step_2"), str(tmp_path / "global_step_3")]
    assert script.resumed == expected


@pytest.mark.parametrize("mode", ["disable", "auto"])
def test_without_a_checkpoint_it_starts_as_before(tmp_path: Path, mode: str) -> None:
    """Checkpoints of an earlier run in the same folder are not this run's."""
    save(tmp_path, 7)
    script = Script(tmp_path, RankLost("rank 1"), 1, ReplicaLost("replica 0"))
    Restarts(3).supervise(script, config_for(tmp_path, mode))
    assert script.resumed == [mode, mode, str(tmp_path / "global_step_1")]


def test_a_checkpoint_that_was_written_again_is_this_runs(tmp_path: Path) -> None:
    """An earlier run may have a checkpoint of the same step; the time of writing decides."""
    save(tmp_path, 1)
    script = Script(tmp_path, 1, RankLost("rank 1"))
    Restarts(3).supervise(script, config_for(tmp_path))
    assert script.resumed == ["disable", str(tmp_path / "global_step_1")]


def test_restarts_are_used_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After max_restarts, the loss ends the run with its exit status; each restart is logged."""
    script = Script(tmp_path, *(RankLost(f"rank {i} died") for i in range(9)))
    with pytest.raises(RankLost, match=r"rank 2 died.*max_restarts=2.*resume_mode=auto") as caught:
        Restarts(2).supervise(script, config_for(tmp_path))
    assert len(script.resumed) == 3
    assert caught.value.exit_code == 5
    assert [m for m in caplog.messages if "starts again from the beginning" in m] == caplog.messages
    assert "rank 0 died" in caplog.messages[0] and "restart 1 of" in caplog.messages[0]


def test_replicas_and_runs_share_one_count() -> None:
    """A run that keeps losing replicas cannot continue for ever by restarting in between."""
    restarts = Restarts(3)
    restarts.spend_on_replicas(ReplicaLost("replica 0"))
    restarts.spend_on_run(RankLost("rank 0"), "the beginning")
    restarts.spend_on_replicas(ReplicaLost("replica 0"))
    with pytest.raises(ReplicaLost):
        restarts.spend_on_replicas(ReplicaLost("replica 0"))
    assert restarts.metrics() == {"fault/replica_restarts": 2.0, "fault/run_restarts": 1.0}


@pytest.mark.parametrize(
    "error",
    [ConfigError("x"), CollapseError("x"), Interrupted("x"), ToolOutage("x"),
     UserError("x"), RuntimeError("a bug")],
)  # fmt: skip
def test_other_errors_are_not_retried(tmp_path: Path, error: Exception) -> None:
    """Errors that would occur again, or were requested, end the run at once."""
    script = Script(tmp_path, error)
    with pytest.raises(type(error)):
        Restarts(3).supervise(script, config_for(tmp_path))
    assert len(script.resumed) == 1


class Mortal(LocalGroup):
    """Three replicas that are lost once, after `life` iterations of the loop, and restarted."""

    def __init__(self, agent: Planned, draw: random.Random, life: int) -> None:
        super().__init__(hosts_of(3, agent), draw)
        self.hosts, self.built = (), ()
        self.agent, self.life = agent, life

    def poll(
        self, calls: Mapping[Any, int], check: Callable[[], None] = lambda: None
    ) -> dict[Any, Any]:
        life, self.life = self.life, 0
        if life:
            self.run(life)
            raise ReplicaLost("replica 0 is lost")
        return super().poll(calls, check)

    def start(self) -> None:
        self.close()
        self.loop, self.replicas = asyncio.new_event_loop(), hosts_of(3, self.agent)

    def start_build(self) -> list[Any]:
        return []

    def call(self, method: str, *args: Any) -> list[Any]:
        return []


def test_groups_of_lost_replicas_are_sampled_again() -> None:
    """Whenever the replicas are lost, all trajectories of two requests come back in order."""
    for seed in range(50):
        draw = random.Random(seed)
        group: Any = Mortal(Planned([], 2, 3), draw, life=seed * 2 + 1)
        replicas = Restarts(1).of(RolloutReplicas(group, Files(Config())))
        lengths = [draw.randint(1, 30) for _ in range(6)]
        starts_of_requests = [make_starts(lengths, 2, first) for first in (0, 10)]
        requests = [replicas.start(starts, Sampling(9)) for starts in starts_of_requests]
        for starts, request in zip(starts_of_requests, requests, strict=True):
            finished = replicas.finish(request)
            assert [(t.group, t.sample) for t in finished] == [(t.group, t.sample) for t in starts]
        assert replicas.restarts.of_replicas == 1
        group.close()


def test_attempts_share_what_counts(tmp_path: Path) -> None:
    """The second attempt's hook knows of the first, and adds the count to each step's metrics."""
    hooks: list[Any] = []

    def attempt(config: Config, add_to: Any) -> None:
        start_up = StartUp()
        add_to(start_up)
        hooks.extend(start_up.hooks)
        if len(hooks) == 1:
            raise ReplicaLost("gone")

    supervised(attempt)(config_for(tmp_path))
    metrics: dict[str, float] = {}
    hooks[1].on_trained(None, metrics)
    assert metrics == {"fault/replica_restarts": 0.0, "fault/run_restarts": 1.0}
