"""The seam between trainer and rewards: what a reward gives back, and how it is called.

The trainer hands a `RewardManager` all trajectories of a batch at once, so that one that asks a
server may ask about all of them together. A plain function of one trajectory is adapted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.errors import ConfigError, explain
from verl.types import Trajectory


@dataclass(frozen=True)
class Reward:
    """The score that is trained on, and its parts for the metrics."""

    score: float
    components: Mapping[str, float] = field(default_factory=dict)


RewardFn = Callable[[Trajectory], Reward]
"""Scores one finished trajectory; the prompt carries the ground truth."""


class RewardManager(ABC):
    """Scores batches of trajectories; what changes during a run is saved with it."""

    @abstractmethod
    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
        """The reward of each trajectory, in order."""

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take note of a step that is over; returns metrics about the reward of that step."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must keep; JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s state. Raises ConfigError when it is not of this reward."""
        if state:
            fix = "give the reward_model options of the checkpoint's run"
            raise ConfigError(explain("resumed reward", dict(state), "one without state", fix))


@dataclass(frozen=True)
class EachAlone(RewardManager):
    """A function of one trajectory, applied to each."""

    score: RewardFn

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
        return [self.score(trajectory) for trajectory in trajectories]


def adapted(reward: RewardFn | RewardManager) -> RewardManager:
    """The manager itself, or one that applies the function to each trajectory."""
    return reward if isinstance(reward, RewardManager) else EachAlone(reward)
