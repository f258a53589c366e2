"""The seam between trainer and rewards: what a reward gives back, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from verl.protocol import Trajectory


@dataclass(frozen=True)
class Reward:
    """The score that is trained on, and its parts for the metrics."""

    score: float
    components: Mapping[str, float] = field(default_factory=dict)


RewardFn = Callable[[Trajectory], Reward]
"""Scores one finished trajectory; the prompt carries the ground truth."""
