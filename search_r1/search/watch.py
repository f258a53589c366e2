"""Notices that a mapped file was rewritten in place, and ends the server before it answers wrongly.

Builders rename a new index into its place, which leaves a server its own files. What else writes
into them (`cp`, `rsync --inplace`) is seen within SECONDS. A search that reads beyond the end of a
file that was cut off meanwhile ends the process at once (SIGBUS), with the stacks in its log.
"""

import logging
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from search_r1.search.errors import IndexMismatch

logger = logging.getLogger(__name__)

SECONDS = 1.0
MAPS = Path("/proc/self/maps")


@contextmanager
def watching(roots: Iterable[str | None]) -> Iterator[None]:
    """Send this process SIGTERM when a file below `roots` that it maps changes; then IndexMismatch.

    The error is raised on leaving. Without Linux's list of mapped files nothing is watched.
    """
    before = {path: _state(path) for path in _mapped([Path(r).resolve() for r in roots if r])}
    problems: list[str] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(SECONDS):
            for path, was in before.items():
                now = _state(path)
                if was and now and now[0] == was[0] and now != was and not problems:
                    problems.append(
                        f"{path} was changed in place while it was served, expected the file that "
                        "was opened; fix: rename a new file into its place, start the server again"
                    )
                    logger.error("stopping: %s", problems[0])
            if problems:
                os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=look, name="watch-files", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if problems:
        raise IndexMismatch(problems[0])


def _mapped(roots: list[Path]) -> set[Path]:
    if not MAPS.exists():
        return set()
    lines = MAPS.read_text(errors="surrogateescape").splitlines()
    paths = {Path("/" + line.partition("/")[2]) for line in lines if "/" in line}
    return {path for path in paths if any(path.is_relative_to(root) for root in roots)}


def _state(path: Path) -> tuple[int, int, int] | None:
    """The file's number, size and time of change; None where it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
