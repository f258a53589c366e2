"""What a training step of ours takes, for `benchmarks.rivals.curve`: a hook of the trainer."""

from __future__ import annotations

import os

import psutil

from verl.config import Config
from verl.trainer.hooks import Hook
from verl.trainer.loop import RayPPOTrainer
from verl.types import Metrics

CPU, LOAD = "clock/cpu_s", "clock/load"


def tree_seconds() -> float:
    """Return the processor seconds so far of this process and all that it started and has."""
    total, this = 0.0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


class Clock(Hook):
    """Measures each step from before sampling until the engines have its weights."""

    def __init__(self, config: Config) -> None:
        self._began = 0.0

    def on_step_begin(self, trainer: RayPPOTrainer) -> None:
        """Start the clock."""
        self._began = tree_seconds()

    def on_trained(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Stop it before the step's validation and checkpoint."""
        metrics[CPU] = tree_seconds() - self._began
        metrics[LOAD] = os.getloadavg()[0]
