"""The interface between trainer and rewards.

The trainer passes a `RewardManager` all trajectories of a batch at once, so that a manager which
calls a server can send them together. A function of one trajectory is wrapped in a manager.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.errors import ConfigError, explain
from verl.plugins import to_outcome
from verl.types import Trajectory


@dataclass(frozen=True)
class Reward:
    """The score that is trained on, and its components for the metrics."""

    score: float
    components: Mapping[str, float] = field(default_factory=dict)
    is_right: bool | None = None
    """Whether the outcome is right, apart from what shapes the score; None: the rule has none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_right", to_outcome(self.is_right))


RewardFn = Callable[[Trajectory], Reward]
"""A function that scores one finished trajectory, whose prompt carries the ground truth."""


class RewardManager(ABC):
    """Scores batches of trajectories; state that changes during a run is saved in checkpoints."""

    @abstractmethod
    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
        """Return the reward of each trajectory, in order."""

    def component_names(self) -> frozenset[str] | None:
        """Return the names of the components of its rewards; None if they are not known before."""
        return None

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Record a finished step and its metrics; return metrics to add to the step's log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`. Raises ConfigError if it is not from this reward."""
        if state:
            fix = "use the reward_model options of the checkpoint's run"
            raise ConfigError(explain("resumed reward", dict(state), "one without state", fix))


@dataclass(frozen=True)
class EachAlone(RewardManager):
    """Applies a function of one trajectory to each trajectory."""

    score: RewardFn

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Reward]:
        return [self.score(trajectory) for trajectory in trajectories]


def adapted(reward: RewardFn | RewardManager) -> RewardManager:
    """Return `reward` itself if it is a manager, else a manager that applies the function."""
    return reward if isinstance(reward, RewardManager) else EachAlone(reward)
