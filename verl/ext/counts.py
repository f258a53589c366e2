"""Adds the counts of lost processes, and the driver's host memory, to each step's metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from verl.machine import HostMemory
from verl.trainer.hooks import Hook
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class Counts(Hook):
    """Adds the metrics that a function returns, and the share of memory in use."""

    def __init__(self, count: Callable[[], Metrics]) -> None:
        self.count = count

    def on_trained(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Add the figures of now."""
        metrics |= self.count()
        metrics["perf/host_memory_used_share"] = HostMemory.now().used_share


def hook(parts: Parts) -> Counts:
    """Return the hook of a run."""
    return Counts(parts.faults)
