"""Child processes of command-line programs: run to the end, wait for health, stop for sure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
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


def wait_healthy(
    process: subprocess.Popen[bytes], port_file: Path, log: Path, timeout_s: float = 60
) -> str:
    """The server's address once `/health` answers; the tail of its log if it does not."""
    deadline = time.time() + timeout_s
    while time.time() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError, ValueError, urllib.error.URLError):
            url = f"http://127.0.0.1:{int(port_file.read_text())}"
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return url
        time.sleep(0.2)
    stop(process)
    tail = "\n".join(log.read_text().splitlines()[-20:])
    raise SystemExit(f"the retriever did not become healthy in {timeout_s:.0f} s; its log:\n{tail}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process we started, and its children."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def stopping(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stop the process when the body ends, however it ends."""
    try:
        yield
    finally:
        stop(process)
