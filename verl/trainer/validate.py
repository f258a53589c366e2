"""Validation: one dialogue per row, greedy by default, scored and written to a jsonl file."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from verl.checkpoint import folders
from verl.checkpoint.folders import RunState
from verl.checkpoint.saver import is_due
from verl.config import Config
from verl.files import atomic_write
from verl.rewards.interface import Reward, RewardManager
from verl.rollout.rollouts import Rollouts
from verl.trainer.collect import check_lost_share, trajectory_seed
from verl.trainer.hooks import Hook
from verl.trainer.metric_names import check_measured
from verl.trainer.metrics import fault_metrics, validation_metrics
from verl.types import Metrics, Prompt, Sampling, Status, Trajectory, start_trajectory

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer

logger = logging.getLogger(__name__)

VALIDATION_STREAM = 1 << 31
"""Replaces the step in validation seeds, so that they differ from those of training steps."""


def validate(
    config: Config,
    rollout: Rollouts,
    prompts: Sequence[Prompt],
    reward: RewardManager,
    dialogues: Path,
) -> Metrics:
    """Score every prompt and write one JSON line for each to `dialogues`.

    A row whose tools or engine still failed after all retries gets the lowest score, and is counted
    in `val/fault/trajectories_failed`. Leaving it out would raise the score, because the rows that
    fail are mostly those that need a tool. Raises ToolOutage, see `check_lost_share`.
    """
    trajectories = sample(config, rollout, prompts)
    failed = [t for t in trajectories if t.status is Status.FAILED]
    share = config.trainer.max_lost_share
    check_lost_share(failed, len(failed), len(trajectories), "validation", share)
    rewards = score_all(trajectories, reward)
    write_dialogues(dialogues, trajectories, rewards)
    faults = {f"val/{name}": count for name, count in fault_metrics(trajectories).items()}
    return {**validation_metrics(trajectories, rewards), **faults}


def score_all(trajectories: Sequence[Trajectory], reward: RewardManager) -> list[Reward]:
    """Return rewards; failed trajectories get the lowest score, at most 0, and components of 0."""
    rewards = reward([t for t in trajectories if t.status is not Status.FAILED])
    components = dict.fromkeys((name for r in rewards for name in r.components), 0.0)
    lowest = Reward(min(0.0, *(r.score for r in rewards)), components)
    remaining = iter(rewards)
    return [lowest if t.status is Status.FAILED else next(remaining) for t in trajectories]


def sample(config: Config, rollout: Rollouts, prompts: Sequence[Prompt]) -> list[Trajectory]:
    """Sample one trajectory per prompt, in requests of `data.val_batch_size`."""
    options = config.val_sampling
    sampling = Sampling(config.data.max_response_length, options.temperature, options.top_p)
    trajectories: list[Trajectory] = []
    size = config.data.val_batch_size
    with tqdm(total=len(prompts), desc="validate", unit="row", leave=False) as bar:
        for first in range(0, len(prompts), size):
            starts = [
                start_trajectory(
                    prompts[row],
                    group=f"val/{row}",
                    seed=trajectory_seed(config.trainer.seed, VALIDATION_STREAM, row),
                )
                for row in range(first, min(first + size, len(prompts)))
            ]
            trajectories += rollout.generate(starts, sampling)
            bar.update(len(starts))
    return trajectories


def write_dialogues(
    path: Path, trajectories: Sequence[Trajectory], rewards: Sequence[Reward]
) -> None:
    """Write one JSON line per row: question, gold answers, dialogue, status, score."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for t, r in zip(trajectories, rewards, strict=True):
            row = {
                "uid": t.prompt.uid,
                "data_source": t.prompt.data_source,
                "question": t.prompt.extra_info.get("question", ""),
                "ground_truth": list(t.prompt.ground_truth),
                "dialogue": t.text,
                "status": t.status.value,
                "score": r.score,
                "stats": t.stats,
            }
            row |= {name: x for name, x in r.components.items() if name not in row}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


class Validation(Hook):
    """Validates before training and when due, and remembers the best score."""

    def __init__(
        self, config: Config, rollout: Rollouts, prompts: Sequence[Prompt],
        reward: RewardManager, total_steps: int,
    ) -> None:  # fmt: skip
        self.config, self.rollout, self.prompts, self.reward = config, rollout, prompts, reward
        self.total_steps = total_steps
        self.best: Mapping[str, Any] | None = None
        """`metric`, `value` and `step` of the best validation so far."""
        self.score: float | None = None
        """`trainer.best_metric` of the current step; None if it was not validated."""

    def on_ready(self, trainer: RayPPOTrainer) -> None:
        """Validate before the first step, or in a run that only validates."""
        options = self.config.trainer
        if options.val_only or (options.val_before_train and trainer.step == 0):
            trainer.log(self.validate(trainer))

    def on_step_begin(self, trainer: RayPPOTrainer) -> None:
        """Forget the last step's score."""
        self.score = None

    def on_metrics(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Validate if a validation is due, and compare its score with the best."""
        if is_due(self.config.trainer.test_freq, trainer.step, self.total_steps):
            metrics |= self.validate(trainer)
            self.score = self._update_best(trainer.step, metrics)

    def validate(self, trainer: RayPPOTrainer) -> Metrics:
        """Score every validation row; dialogues go to `validation/step_N.jsonl`.

        Raises PluginError if the first validation of a run has no `trainer.best_metric`.
        """
        folder = Path(self.config.trainer.default_local_dir) / folders.VALIDATION
        path = folder / f"step_{trainer.step}.jsonl"
        with trainer.during("validate"):
            metrics = validate(self.config, self.rollout, self.prompts, self.reward, path)
        if self.best is None and not self.config.trainer.val_only:
            check_measured(self.config.trainer.best_metric, metrics)
        return metrics

    def _update_best(self, step: int, metrics: Metrics) -> float | None:
        """Return `trainer.best_metric` at this step, and remember it if it is the best so far."""
        name = self.config.trainer.best_metric
        score = metrics.get(name)
        if score is None:
            measured = ", ".join(sorted(key for key in metrics if key.startswith("val/")))
            logger.warning("trainer.best_metric: no %s was measured, only %s", name, measured)
        elif self.best is None or score > self.best["value"]:
            self.best = {"metric": name, "value": score, "step": step}
        return score

    def state_dict(self) -> dict[str, Any]:
        """Return the best validation, and the score of this step."""
        return {"best": self.best, "score": self.score}

    def load_checkpoint(self, state: RunState, folder: Path) -> None:
        """Restore the best validation, unless it was the best by another metric."""
        metric = self.config.trainer.best_metric
        is_same = state.best is not None and state.best.get("metric", metric) == metric
        self.best = state.best if is_same else None


def hook(parts: Parts) -> Validation | None:
    """Return the hook of a run that samples."""
    inputs = parts.inputs
    if parts.rollout is None:
        return None
    prompts, total_steps = inputs.val_prompts, inputs.total_steps
    return Validation(inputs.config, parts.rollout, prompts, parts.reward_manager, total_steps)
