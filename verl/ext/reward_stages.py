"""Keeps the reward's state: rewards in stages (`verl.rewards.stages`) change during a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint.folders import RunState
from verl.rewards.interface import RewardManager
from verl.trainer.hooks import Hook
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class RewardStages(Hook):
    """Has the reward observe each step, with the metrics of its validation."""

    def __init__(self, reward: RewardManager) -> None:
        self.reward = reward

    def on_metrics(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Add what the reward returns to the step's metrics."""
        metrics |= self.reward.observe(trainer.step, metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the reward's state."""
        return {"reward": self.reward.state_dict()}

    def load_checkpoint(self, state: RunState, folder: Path) -> None:
        """Restore the reward's state. Raises ConfigError if it is from another reward."""
        self.reward.load_state_dict(state.others.get("reward", {}))


def hook(parts: Parts) -> RewardStages:
    """Return the hook of a run."""
    return RewardStages(parts.reward_manager)
