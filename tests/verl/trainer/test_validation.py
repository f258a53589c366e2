"""How validation samples."""

import json
from pathlib import Path

import pytest

from tests.verl.trainer.recording import RecordingReplicas, prompts
from verl.agent.environment import Environment
from verl.config import Config
from verl.errors import ToolOutage
from verl.rewards.interface import EachAlone, Reward
from verl.rollout.retry import RetryingRollout
from verl.trainer.validation import sample, validate
from verl.types import Metrics


def requested(config: Config) -> set[tuple[float, float]]:
    """Temperature and top_p of every request of a validation."""
    replicas = RecordingReplicas([])
    sample(config, replicas, prompts(4))
    return {(sampling.temperature, sampling.top_p) for _, sampling in replicas.requests}


def test_line_13_validation_is_greedy_unless_the_original_is_asked_for() -> None:
    """`compat.sampled_validation` samples as training does; else val_kwargs decide."""
    config = Config()
    rollout = config.actor_rollout_ref.rollout
    rollout.temperature, rollout.top_p = 0.7, 0.9
    assert requested(config) == {(0.0, 1.0)}
    config.compat.sampled_validation = True
    assert requested(config) == {(0.7, 0.9)}
    config.compat.sampled_validation = False
    rollout.val_kwargs.temperature = 0.3
    assert requested(config) == {(0.3, 1.0)}


def validated(replicas: RecordingReplicas, dialogues: Path) -> Metrics:
    """Six rows, each of which scores 1 where it could be played."""
    config = Config()
    rollout = RetryingRollout(replicas, Environment())
    reward = EachAlone(lambda trajectory: Reward(1.0, {"em": 1.0}))
    return validate(config, rollout, prompts(6), reward, dialogues)


def test_line_19_rows_that_infrastructure_broke_are_not_wrong(tmp_path: Path) -> None:
    """They are left out of every mean, and counted; dialogues hold what was scored."""
    replicas = RecordingReplicas([])
    replicas.fail = lambda start: start.group in ("val/1", "val/4")
    found = validated(replicas, tmp_path / "step_1.jsonl")
    assert (found["val/em"], found["val/num_rows"]) == (1.0, 4)
    assert found["val/fault/trajectories_dropped"] == 2
    rows = [json.loads(line) for line in (tmp_path / "step_1.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["answered"] * 4


def test_a_validation_without_any_row_is_no_measurement(tmp_path: Path) -> None:
    """It ends the run, with the reason, rather than with a score of 0."""
    replicas = RecordingReplicas([])
    replicas.fail = lambda start: True
    with pytest.raises(ToolOutage, match="6 trajectories of validation"):
        validated(replicas, tmp_path / "step_1.jsonl")
