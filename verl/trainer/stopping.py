"""The early end of a run: on a signal, or before its time limit.

It comes as `Interrupted`, between two steps or while trajectories are sampled, when the weights are
those of a finished step. The trainer then saves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import psutil

from verl.errors import Interrupted

logger = logging.getLogger(__name__)

ASKING = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*ASKING, signal.SIGUSR1)
JOB_END = "SLURM_JOB_END_TIME"
"""Where Slurm tells a job its end, in seconds since the epoch."""
MARGIN_S = 15.0
"""Left between the end of a save and the end of the time, for taking everything down."""


def end_of_time(time_limit: float | None, environ: Mapping[str, str] = os.environ) -> float | None:
    """When this process must be over, in seconds since the epoch; None for no limit.

    `time_limit`: minutes from the start of the process; None reads the job's end from Slurm.
    """
    if time_limit is not None:
        return psutil.Process().create_time() + 60 * time_limit
    return float(environ[JOB_END]) if environ.get(JOB_END, "").isdigit() else None


@dataclass
class Stopper:
    """Knows whether the run was asked to stop, and whether another step fits into its time."""

    end: float | None = None
    """When the run must be over, in seconds since the epoch; None for no limit."""
    save_s: Callable[[], float] = lambda: 0.0
    """How long the checkpoint of the end may take."""
    clock: Callable[[], float] = time.time
    longest_step_s: float = 0.0
    reason: str = ""
    """Why the run was asked to stop; empty while it was not."""
    is_urgent: bool = False
    """It was asked twice: nothing is saved any more."""
    _is_interruptible: bool = field(init=False, default=False)
    _was_asked: bool = field(init=False, default=False)
    _previous: dict[int, Any] = field(init=False, default_factory=dict)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM, SIGUSR1 and Ctrl-C for a request to save and stop.

        A second SIGTERM or Ctrl-C ends at once. Only a process's main thread can listen; elsewhere
        signals do what they did before, as one does that is ignored (Ctrl-C, in the background).
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heard = (one for one in SIGNALS if signal.getsignal(one) != signal.SIG_IGN)
        self._previous = {number: signal.signal(number, self._receive) for number in heard}
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number in ASKING and self._was_asked:
            self.is_urgent = True
            self._restore()
            signal.raise_signal(number)
            return
        self._was_asked |= number in ASKING
        if number == signal.SIGINT:  # written past the log, whose lock may be held here
            os.write(2, b"\nsaving what is finished, then stopping; Ctrl-C again ends at once\n")
        self.reason = self.reason or f"the run got {signal.Signals(number).name}"
        if self._is_interruptible:
            self._is_interruptible = False
            # While Ray waits for actors, this is the only exception that it lets through.
            raise KeyboardInterrupt(self.reason)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """A signal ends the body at once, in KeyboardInterrupt: its weights are a finished step's.

        Raises Interrupted when a signal came before.
        """
        self._raise_if_asked()
        self._is_interruptible = True
        try:
            yield
        finally:
            self._is_interruptible = False

    @contextlib.contextmanager
    def timing_step(self) -> Iterator[None]:
        """Remember how long the longest step took."""
        start = self.clock()
        yield
        self.longest_step_s = max(self.longest_step_s, self.clock() - start)

    def check(self) -> None:
        """Raise Interrupted when the run was asked to stop, or its time is nearly over."""
        self._raise_if_asked()
        if self.end is None or not self.longest_step_s:
            return
        left, needed = self.end - self.clock(), self.longest_step_s + self.save_s()
        if left < needed + MARGIN_S:
            raise Interrupted(
                f"the run's time is over in {left:.0f} s, and another step and its checkpoint may "
                f"take {needed:.0f} s"
            )

    def _raise_if_asked(self) -> None:
        if self.reason:
            raise Interrupted(self.reason)
