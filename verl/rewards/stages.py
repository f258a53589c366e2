"""Rewards one after another: two stages, and any schedule of that kind.

A stage ends after a step, or when a metric has stopped rising; the last one has no end. Which
stage it is, and what it has seen, is saved with the checkpoint.
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
    """The reward of the stage that the run has reached."""

    def __init__(self, stages: Sequence[StageConfig], rewards: Sequence[RewardManager]) -> None:
        """The options that say when a stage ends, and what it scores by."""
        assert stages and len(stages) == len(rewards), "one stage or more, a reward each"
        self._stages, self._rewards = list(stages), list(rewards)
        self._enter(0)

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
        return self._rewards[self._index](trajectories)

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Move on where the step, or the metric's plateau, ends the stage.

        Returns `reward/stage`, the stage (from 1) whose reward this step was scored by.
        """
        seen = {"reward/stage": float(self._index + 1)}
        is_over = self._reached_plateau(metrics)
        for number, stage in enumerate(self._stages[self._index : -1], self._index + 1):
            if not is_over and (stage.until_step is None or step < stage.until_step):
                break
            self._enter(number)
            is_over = False
            logger.info("step %d: the reward is %s from now on", step, self._names[number])
        return seen

    def state_dict(self) -> dict[str, Any]:
        """The stage and what its plateau has seen; null for no value yet."""
        best = None if math.isinf(self._best) else self._best
        return {"index": self._index, "names": self._names, "best": best, "stale": self._stale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the stage of the checkpoint; one without stages starts with the first."""
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
        """What each stage scores by: a reward, or a weighted sum of them."""
        return [
            " + ".join(f"{weight:g} {name}" for name, weight in stage.weights.items()) or stage.name
            for stage in self._stages
        ]

    def _enter(self, index: int) -> None:
        self._index, self._best, self._stale = index, -math.inf, 0
        self._has_warned = False

    def _reached_plateau(self, metrics: Mapping[str, float]) -> bool:
        """Record the plateau's metric; true once it has not risen for `patience` values."""
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
        """Warn once a stage that a step lacks a metric it should have: it may be misspelled."""
        is_due = not metric.startswith("val/") or "val/num_rows" in metrics
        if is_due and not self._has_warned:
            self._has_warned = True
            logger.warning("a stage waits for a plateau of %s, which this step has not logged",
                           metric)  # fmt: skip
