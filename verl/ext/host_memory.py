"""Adds the driver's host memory to each step's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.machine import HostMemory
from verl.trainer.hooks import Hook
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class HostMemoryUse(Hook):
    """Adds the share of memory in use."""

    def on_trained(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Add the share of now."""
        metrics["perf/host_memory_used_share"] = HostMemory.now().used_share


def hook(parts: Parts) -> HostMemoryUse:
    """Return the hook of a run."""
    return HostMemoryUse()
