"""Tells the reward of each finished step, for rewards in stages (`verl.rewards.stages`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.rewards.interface import RewardManager
from verl.trainer.hooks import Hook
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.loop import RayPPOTrainer


class RewardStages(Hook):
    """Has the reward observe each step, with the metrics of its validation."""

    def __init__(self, reward: RewardManager) -> None:
        self.reward = reward

    def on_metrics(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Add what the reward returns to the step's metrics."""
        metrics |= self.reward.observe(trainer.step, metrics)
