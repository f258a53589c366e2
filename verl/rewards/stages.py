"""Rewards used one after another during a run, in stages.

A stage ends after a given step or when a metric has stopped rising; the last stage does not end.
The current stage and the progress of its metric are saved in checkpoints.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from verl.config.reward import StageConfig
from verl.errors import ConfigError, explain
from verl.rewards.interface import Reward, RewardManager
from verl.types import Trajectory

logger = logging.getLogger(__name__)


class StagedReward(RewardManager):
    """Scores with the reward of the current stage."""

    def __init__(self, stages: Sequence[StageConfig], rewards: Sequence[RewardManager]) -> None:
        """`stages` say when each stage ends; `rewards[i]` scores in stage i."""
        assert stages and len(stages) == len(rewards), "expected one reward for each stage"
        self._stages, self._rewards = list(stages), list(rewards)
        self._enter(0)

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
        return self._rewards[self._index](trajectories)

    def component_names(self) -> frozenset[str] | None:
        """Return the names of all stages' components; None if those of one are not known."""
        names = [reward.component_names() for reward in self._rewards]
        known = [part for part in names if part is not None]
        return frozenset().union(*known) if len(known) == len(names) else None

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Enter the next stage if the step, or the plateau of the metric, ends the current one.

        Returns `reward/stage`, the number (from 1) of the stage that scored this step.
        """
        stage_metrics = {"reward/stage": float(self._index + 1)}
        is_over = self._reached_plateau(metrics)
        for number, stage in enumerate(self._stages[self._index : -1], self._index + 1):
            if not is_over and (stage.until_step is None or step < stage.until_step):
                break
            self._enter(number)
            is_over = False
            logger.info("step %d: the reward is %s from now on", step, self._names[number])
        return stage_metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the stage and its plateau's state; `best` is null before the first value."""
        best = None if math.isinf(self._best) else self._best
        return {"index": self._index, "names": self._names, "best": best, "stale": self._stale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue in the checkpoint's stage; a checkpoint without stages starts with the first."""
        if not state:
            return
        if state["names"] != self._names:
            expected = f"the checkpoint's {state['names']}"
            fix = "resume with the stages of the checkpoint"
            raise ConfigError(explain("reward_model.stages", self._names, expected, fix))
        self._enter(int(state["index"]))
        self._best = -math.inf if state["best"] is None else float(state["best"])
        self._stale = int(state["stale"])

    @property
    def _names(self) -> list[str]:
        """The reward, or weighted sum of rewards, of each stage, as text."""
        return [
            " + ".join(f"{weight:g} {name}" for name, weight in stage.weights.items()) or stage.name
            for stage in self._stages
        ]

    def _enter(self, index: int) -> None:
        self._index, self._best, self._stale = index, -math.inf, 0
        self._has_warned = False

    def _reached_plateau(self, metrics: Mapping[str, float]) -> bool:
        """Record the plateau's metric; return whether it has not risen for `patience` values."""
        plateau = self._stages[self._index].plateau
        if plateau is None:
            return False
        if plateau.metric not in metrics:
            self._warn_of_missing(plateau.metric, metrics)
            return False
        value = metrics[plateau.metric]
        is_better = value > self._best + plateau.min_delta  # false for NaN
        if is_better:
            self._best = value
        self._stale = 0 if is_better else self._stale + 1
        return self._stale >= plateau.patience

    def _warn_of_missing(self, metric: str, metrics: Mapping[str, float]) -> None:
        """Warn once per stage that a step lacks the metric, whose name may be misspelled."""
        # Validation metrics are expected only in steps that were validated.
        is_due = not metric.startswith("val/") or "val/num_rows" in metrics
        if is_due and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a reward stage waits for a plateau of %s, which this step has not logged", metric
            )
