"""Child processes of command-line programs, run to their end."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

GRACE_S = 60.0
"""How long an interrupted child may take to clean up after itself."""


def run(command: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command to its end; CalledProcessError if it fails.

    When we are interrupted the child is asked to end and given time to stop what it started.
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
