"""How far a long job is: a bar on a terminal, elsewhere a log line now and then."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30.0

Report = Callable[[int], None]
"""Takes how much of the whole is done by now."""


@contextmanager
def progress(what: str, unit: str, total: int, done: int = 0) -> Iterator[Report]:
    """A reporter of `what`, of which `done` of `total` were done by an earlier run."""
    if sys.stderr.isatty():
        with tqdm(total=total, initial=done, desc=what, unit=unit, unit_scale=True) as bar:

            def report(now: int) -> None:
                bar.update(now - bar.n)

            yield report
    else:
        yield LogLines(what, unit, total, done)


class LogLines:
    """Reports with rate and remaining time, at most one line in `interval` seconds."""

    def __init__(
        self,
        what: str,
        unit: str,
        total: int,
        done: int,
        interval: float = SECONDS_BETWEEN_LINES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`done` of `total` were there before the clock (s) was started."""
        self._what, self._unit, self._total, self._before = what, unit, total, done
        self._interval, self._clock = interval, clock
        self._start = self._last = clock()

    def __call__(self, done: int) -> None:
        """Say so if a line is due, or if all is done."""
        now = self._clock()
        if now - self._last < self._interval and done < self._total:
            return
        self._last = now
        logger.info("%s", self.line(done, now - self._start))

    def line(self, done: int, seconds: float) -> str:
        """What a line says when `done` are there after `seconds` of this run."""
        rate = (done - self._before) / seconds if seconds > 0 else 0.0
        left = f", {duration((self._total - done) / rate)} left" if rate > 0 else ""
        share = 100 * done / self._total if self._total else 100.0
        counts = f"{done} of {self._total} {self._unit} ({share:.1f} %)"
        return f"{self._what}: {counts}, {rate:.1f} a second{left}"


def duration(seconds: float) -> str:
    """`1:02:03` for 3,723 seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
