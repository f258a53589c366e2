"""Progress of long jobs: a bar on a terminal, otherwise a log line every 30 seconds."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30.0

Report = Callable[[int], None]
"""Is called with the number of units that are done so far."""


@contextmanager
def progress(job: str, unit: str, total: int, done: int = 0) -> Iterator[Report]:
    """Yield a function that reports progress of a job; an earlier run did `done` units."""
    if sys.stderr.isatty():
        with tqdm(total=total, initial=done, desc=job, unit=unit, unit_scale=True) as bar:

            def report(now: int) -> None:
                bar.update(now - bar.n)

            yield report
    else:
        yield log_lines(job, unit, total, done)


def log_lines(
    job: str, unit: str, total: int, before: int, clock: Callable[[], float] = time.monotonic
) -> Report:
    """Return a function that logs progress; the rate excludes `before`, done by an earlier run."""
    start = last = clock()

    def report(done: int) -> None:
        nonlocal last
        now = clock()
        if now - last < SECONDS_BETWEEN_LINES and done < total:
            return
        last = now
        rate = (done - before) / (now - start) if now > start else 0.0
        left = f", {tqdm.format_interval((total - done) / rate)} left" if rate > 0 else ""
        share = 100 * done / total if total else 100.0
        logger.info(
            "%s: %d of %d %s (%.1f %%), %.1f a second%s", job, done, total, unit, share, rate, left
        )

    return report
