"""Steady step times: keeping freed memory, garbage collection between steps, one torch thread.

Otherwise the driver's cost per trajectory grows with the size of a step: malloc returns the memory
of a large batch's columns, which the kernel then clears anew; and Python runs its collector by the
number of new objects, of which a step of 20,000 trajectories makes millions, all freed without it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from verl.malloc import keep_freed_memory
from verl.trainer.hooks import Hook
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class Steady(Hook):
    """Keeps the driver's step times steady."""

    def running(self, trainer: RayPPOTrainer) -> AbstractContextManager[None]:
        """Keep freed memory, and collect no garbage within steps."""
        return steady_memory()

    def during(self, phase: str, trainer: RayPPOTrainer) -> AbstractContextManager[None]:
        """Compute the batch's columns with one thread."""
        return one_thread() if phase == "learn" else contextlib.nullcontext()

    def on_step_end(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Collect garbage, for the only time in a step."""
        gc.collect()


def hook(parts: Parts) -> Steady:
    """Return the hook of a run."""
    return Steady()


@contextlib.contextmanager
def steady_memory() -> Iterator[None]:
    """Keep freed memory; collect garbage by `gc.collect` only, which ignores all older objects."""
    # Objects that the program has frozen stay frozen: each run of several would traverse them.
    was_enabled, had_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    with keep_freed_memory():
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            yield
        finally:
            if not had_frozen:
                gc.unfreeze()
            if was_enabled:
                gc.enable()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread, so that sums do not depend on the number of cores."""
    previous = torch.get_num_threads()
    # The driver's columns gain nothing from more threads, which spin while they wait.
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
