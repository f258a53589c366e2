"""How validation samples and scores."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.verl.trainer.recording import RecordingReplicas, prompts
from verl.agent.environment import Environment
from verl.checkpoint.folders import RunState
from verl.config import Config
from verl.errors import ToolOutage
from verl.ext.retry import RetryingRollout
from verl.rewards.interface import EachAlone, Reward
from verl.trainer.validate import Validation, sample, validate
from verl.types import Metrics, Trajectory


def requested(config: Config) -> set[tuple[float, float]]:
    """Return temperature and top_p of every request of a validation."""
    replicas = RecordingReplicas([])
    sample(config, replicas, prompts(4))
    return {(sampling.temperature, sampling.top_p) for _, sampling in replicas.requests}


def test_line_13_validation_is_greedy_unless_the_original_is_asked_for() -> None:
    """`compat=search_r1` samples as in training; otherwise val_kwargs decide."""
    config = Config()
    rollout = config.actor_rollout_ref.rollout
    rollout.temperature, rollout.top_p = 0.7, 0.9
    assert requested(config) == {(0.0, 1.0)}
    config.compat = "search_r1"
    assert requested(config) == {(0.7, 0.9)}
    config.compat = "none"
    rollout.val_kwargs.temperature = 0.3
    assert requested(config) == {(0.3, 1.0)}


def run_validation(replicas: RecordingReplicas, dialogues: Path, max_share: float = 0.5) -> Metrics:
    """Validate six rows of scores 1 and -0.5, of which a share of `max_share` may fail."""
    config = Config()
    config.trainer.max_lost_share = max_share
    rollout = RetryingRollout(replicas, Environment())

    def score(trajectory: Trajectory) -> Reward:
        is_right = trajectory.group != "val/0"
        return Reward(1.0 if is_right else -0.5, {"em": float(is_right)})

    return validate(config, rollout, prompts(6), EachAlone(score), dialogues)


def test_failed_rows_count_with_the_lowest_score(tmp_path: Path) -> None:
    """No row is left out of a mean, and failed rows are counted."""
    replicas = RecordingReplicas([])
    replicas.fail = lambda start: start.group in ("val/1", "val/4")
    found = run_validation(replicas, tmp_path / "step_1.jsonl")
    assert (found["val/em"], found["val/num_rows"]) == (3 / 6, 6)
    assert found["val/score"] == pytest.approx((3 * 1.0 + 3 * -0.5) / 6)
    assert found["val/fault/trajectories_failed"] == 2
    assert found["val/fault/trajectories_dropped"] == 0
    rows = [json.loads(line) for line in (tmp_path / "step_1.jsonl").read_text().splitlines()]
    assert [(row["status"], row["em"]) for row in rows] == [
        ("answered", 0.0), ("failed", 0.0), *[("answered", 1.0)] * 2, ("failed", 0.0),
        ("answered", 1.0),
    ]  # fmt: skip


def test_a_component_replaces_neither_the_score_nor_other_fields(tmp_path: Path) -> None:
    """A user's reward may name its components like fields of the file."""
    reward = EachAlone(lambda t: Reward(0.5, {"score": 9.0, "status": 9.0, "own": 2.0}))
    rollout = RetryingRollout(RecordingReplicas([]), Environment())
    found = validate(Config(), rollout, prompts(2), reward, tmp_path / "step_1.jsonl")
    assert found["val/score"] == 0.5 and found["val/own"] == 2.0
    row = json.loads((tmp_path / "step_1.jsonl").read_text().splitlines()[0])
    assert (row["score"], row["status"], row["own"]) == (0.5, "answered", 2.0)


def test_a_validation_of_too_few_rows_ends_the_run(tmp_path: Path) -> None:
    """The share of lost rows is limited as in a training step."""
    replicas = RecordingReplicas([])
    replicas.fail = lambda start: start.group in ("val/1", "val/4")
    with pytest.raises(ToolOutage, match=r"validation: .* 2 of 6 .* trainer.max_lost_share=0.3"):
        run_validation(replicas, tmp_path / "step_1.jsonl", max_share=0.3)


def test_a_validation_whose_rows_all_failed_ends_the_run(tmp_path: Path) -> None:
    """The error has the reason; there is no score of 0."""
    replicas = RecordingReplicas([])
    replicas.fail = lambda start: True
    with pytest.raises(ToolOutage, match=r"validation: .* 6 of 6"):
        run_validation(replicas, tmp_path / "step_1.jsonl", max_share=1.0)


@pytest.mark.parametrize(("best", "restored"), [
    ({"metric": "val/em", "value": 0.6, "step": 4}, 0.6),
    ({"metric": "val/f1", "value": 0.6, "step": 4}, None),
    ({"value": 0.6, "step": 4}, 0.6),
    (None, None),
])  # fmt: skip
def test_the_best_by_another_metric_is_not_restored(
    tmp_path: Path, best: dict[str, Any] | None, restored: float | None
) -> None:
    """It would stay the best for ever; older checkpoints may not say the metric."""
    config = Config()
    config.trainer.best_metric = "val/em"
    replicas, reward = RecordingReplicas([]), EachAlone(lambda t: Reward(0.0))
    validation = Validation(config, replicas, prompts(1), reward, 3)
    validation.load_checkpoint(RunState(5, {}, 0.0, best=best), tmp_path)
    assert (None if validation.best is None else validation.best["value"]) == restored
