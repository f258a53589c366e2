"""Adds counts from outside of the trainer, such as those of lost processes, to each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from verl.trainer.hooks import Hook
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class Counts(Hook):
    """Adds the metrics that a function returns."""

    def __init__(self, count: Callable[[], Metrics]) -> None:
        self.count = count

    def on_trained(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Add the counts of now."""
        metrics |= self.count()


def hook(parts: Parts) -> Counts:
    """Return the hook of a run."""
    return Counts(parts.faults)
