"""Stops a run early: on a signal, or before its time limit.

A run is interrupted between two steps or while trajectories are sampled, when the weights are those
of a finished step, so that the trainer can save them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from verl.errors import Interrupted
from verl.trainer.hooks import Hook
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer

logger = logging.getLogger(__name__)

ESCALATING_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end the run at once when one of them is received a second time."""
SIGNALS = (*ESCALATING_SIGNALS, signal.SIGUSR1)
"""Signals that make the run save and stop."""
JOB_END = "SLURM_JOB_END_TIME"
"""Environment variable with the end of a Slurm job, in seconds since the epoch."""
MARGIN_S = 15.0
"""Seconds between the end of the last save and the deadline, to shut everything down."""
SLOW_DISK = 200e6
"""Assumed write speed in bytes per second, until a checkpoint has been timed."""


def run_deadline(time_limit: float | None, environ: Mapping[str, str] = os.environ) -> float | None:
    """Return when this process must have ended, in seconds since the epoch; None for no limit.

    `time_limit` is in minutes from the start of the process; with None, the deadline is the end of
    the Slurm job, if there is one.
    """
    if time_limit is not None:
        return psutil.Process().create_time() + 60 * time_limit
    return float(environ[JOB_END]) if environ.get(JOB_END, "").isdigit() else None


@dataclass
class Stopper(Hook):
    """Decides when the run must stop: on a signal, or if another step would exceed the deadline."""

    deadline: float | None = None
    """When the run must have ended, in seconds since the epoch; None for no limit."""
    save_s: Callable[[], float] = lambda: 0.0
    """Returns the expected seconds of the final checkpoint."""
    clock: Callable[[], float] = time.time
    longest_step_s: float = 0.0
    reason: str = ""
    """Why the run must stop; empty while there is no reason."""
    is_urgent: bool = False
    """Whether a second signal was received, so that the run ends without saving."""
    _step_began: float | None = field(init=False, default=None)
    _is_interruptible: bool = field(init=False, default=False)
    _has_signal: bool = field(init=False, default=False)
    """Whether one of `ESCALATING_SIGNALS` was received."""
    _previous_handlers: dict[int, Any] = field(init=False, default_factory=dict)

    def running(self, trainer: RayPPOTrainer) -> AbstractContextManager[None]:
        """Handle signals during the run."""
        return self.handling_signals()

    def during(self, phase: str, trainer: RayPPOTrainer) -> AbstractContextManager[None]:
        """Let signals end the phases in which nothing but sampling happens."""
        return self.interruptible() if phase in ("collect", "validate") else nullcontext()

    def on_step_begin(self, trainer: RayPPOTrainer) -> None:
        """Raise Interrupted if no other step may begin."""
        self.check()
        self._step_began = self.clock()

    def on_wait(self) -> None:
        """As `on_step_begin`."""
        self.check()

    def stop_reason(self) -> str:
        """Return the signal that was received; empty if the run must end without saving."""
        return "" if self.is_urgent else self.reason

    def on_step_end(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Measure the step's duration, with validation and saving."""
        if self._step_began is not None:
            self.longest_step_s = max(self.longest_step_s, self.clock() - self._step_began)

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle SIGTERM, SIGUSR1 and Ctrl-C as requests to save and stop, within the body.

        A second SIGTERM or Ctrl-C ends the run at once. Signals that are ignored, such as Ctrl-C in
        a background job, stay ignored. Outside of the main thread, where Python cannot set signal
        handlers, nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in ESCALATING_SIGNALS and self._has_signal:
            self.is_urgent = True
            self._restore()
            signal.raise_signal(number)
            return
        self._has_signal |= number in ESCALATING_SIGNALS
        if number == signal.SIGINT:  # not logged: the interrupted code may hold the logging lock
            os.write(2, b"\nsaving the finished steps, then stopping; Ctrl-C again ends at once\n")
        self.reason = self.reason or f"the run received {signal.Signals(number).name}"
        if self._is_interruptible:
            self._is_interruptible = False
            # The only exception that Ray lets pass while it waits for actors.
            raise KeyboardInterrupt(self.reason)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal end the body at once, by KeyboardInterrupt; it must not change weights.

        Raises Interrupted if a signal was received before.
        """
        self._raise_if_stopping()
        self._is_interruptible = True
        try:
            yield
        finally:
            self._is_interruptible = False

    def check(self) -> None:
        """Raise Interrupted after a signal, or if the time is too short for another step."""
        self._raise_if_stopping()
        if self.deadline is None or not self.longest_step_s:
            return
        left = self.deadline - self.clock()
        needed = self.longest_step_s + self.save_s()
        if left < needed + MARGIN_S:
            raise Interrupted(
                f"the run's time limit is reached in {left:.0f} s, and another step and its "
                f"checkpoint may take {needed:.0f} s"
            )

    def _raise_if_stopping(self) -> None:
        if self.reason:
            raise Interrupted(self.reason)


def hook(parts: Parts) -> Stopper:
    """Return the hook of a run."""
    saver, groups = parts.saver, parts.ranks.groups

    def save_s() -> float:
        ranks = (rank for group in groups for rank in group.call("checkpoint_memory"))
        return saver.longest_s or sum(num_bytes for _, num_bytes, _ in ranks) / SLOW_DISK

    return Stopper(run_deadline(parts.config.trainer.time_limit), save_s)
