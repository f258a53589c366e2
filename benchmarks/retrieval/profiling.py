"""Profiles a server process from outside with py-spy, an optional package."""

import shutil
import signal
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.retrieval.figures import Figure
from search_r1.retrieval.errors import SetupError

RATE = 200
"""Samples per second."""


def find_py_spy() -> str:
    """Return the path of the program py-spy. Raises SetupError if it is missing."""
    in_environment = shutil.which("py-spy", path=sysconfig.get_path("scripts"))
    program = in_environment or shutil.which("py-spy")
    if program is None:
        raise SetupError("--profile needs py-spy, which is missing: pip install py-spy")
    return program


@contextmanager
def record_profile(pid: int, path: Path) -> Iterator[None]:
    """Sample the process within the context and write its collapsed stacks to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [find_py_spy(), "record", "--pid", str(pid), "--rate", str(RATE), "--gil"]
    command += ["--format", "raw", "--duration", "3600", "--output", str(path)]
    process = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def shares(collapsed: str) -> dict[str, float]:
    """Return the share of samples in which each function is innermost, largest first.

    `collapsed` has lines `outer;inner;innermost (file.py:LINE) COUNT`.
    """
    counts: Counter[str] = Counter()
    for line in collapsed.splitlines():
        stack, _, count = line.rpartition(" ")
        counts[stack.rpartition(";")[2].rpartition(":")[0] + ")"] += int(count)
    total = counts.total()
    return {name: count / total for name, count in counts.most_common()}


def profile_figures(path: Path, top: int = 12) -> list[Figure]:
    """Return the `top` functions that hold the GIL most often."""
    top_shares = list(shares(path.read_text()).items())[:top]
    note = "of samples that hold the GIL"
    return [Figure(f"profile: {name}", 100 * share, "%", note=note) for name, share in top_shares]
