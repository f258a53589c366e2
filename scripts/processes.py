"""Runs child processes of command-line programs."""

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

GRACE_S = 60.0
"""Seconds that an interrupted child may take to clean up."""


def run(command: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command to its end. Raises CalledProcessError if it fails.

    If this process is interrupted, the child is terminated and given time to stop its own children.
    """
    process = subprocess.Popen(command, cwd=cwd, env=env)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        process.kill()
        raise
    if code:
        raise subprocess.CalledProcessError(code, command)
