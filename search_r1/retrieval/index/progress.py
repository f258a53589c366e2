"""Progress of long jobs: a bar on a terminal, otherwise a log line every 30 seconds."""

import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)

LINE = "{desc}: {n} of {total}{unit} ({percentage:.1f} %), {rate_noinv_fmt}, {remaining} left"
SECONDS_BETWEEN_LINES = 30.0


class _LogLines(io.TextIOBase):
    """Logs what tqdm writes."""

    def write(self, text: str) -> int:
        if line := text.strip():
            logger.info(line)
        return len(text)


@contextmanager
def progress(job: str, unit: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the units done so far; an earlier run did `done` of them."""
    style: dict[str, Any] = {"unit_scale": True}
    if not sys.stderr.isatty():
        style = {"file": _LogLines(), "bar_format": LINE, "mininterval": SECONDS_BETWEEN_LINES}
    with tqdm(total=total, initial=done, desc=job, unit=f" {unit}", miniters=1, **style) as bar:

        def report(now: int) -> None:
            bar.update(now - bar.n)

        yield report
