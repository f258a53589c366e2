"""Says what a command is doing while it starts: one line for each phase that may take seconds."""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator

from psutil import Process
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # also where a command logs warnings only

REFRESHES_PER_S = 4


@contextlib.contextmanager
def phase(title: str) -> Iterator[None]:
    """Show a phase while the block runs: on a terminal with its time, in a log when it begins."""
    if not sys.stderr.isatty():
        logger.info("%s (%.1f s so far)", title, time.time() - Process().create_time())
        yield
        return
    columns = SpinnerColumn(finished_text="✓"), TextColumn("{task.description}")
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(stderr=True),
        refresh_per_second=REFRESHES_PER_S, redirect_stdout=False,
    ) as bar:  # fmt: skip
        task = bar.add_task(title, total=1)
        yield
        bar.update(task, completed=1)
