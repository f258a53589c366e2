"""Every process that a run starts goes down with it, whatever ended it.

Each attempt of a run has a mark: a variable in the environment of every process it starts, so that
Ray's daemons, actors, engine cores and their workers are found wherever they hang in the process
tree. A small process of its own, the watchdog, holds the reading end of a pipe whose writing end
the driver holds. When the driver ends, even by SIGKILL, the pipe does too, and the watchdog kills
what still has the mark, and removes what those had open in shared memory. Nothing else is
touched: another run has another mark.

This file is also the watchdog's program; it imports little, to start at once and stay small.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import psutil

MARK = "SEARCH_R1_RUN"
"""Variable with the mark of the attempt that a process belongs to."""
PART = "SEARCH_R1_PART"
"""Variable with the part of it, where that may be replaced alone: `MARK/replica-0`."""
KEEP_ENVIRONMENT = "SPT_NOENV"
"""Has Ray and vLLM, which give processes titles, not write these over the environment."""
MAPPED_FILE = re.compile(r"\s(/dev/shm/[^/\s]+)$", re.MULTILINE)
"""A file directly in there, of a line of /proc/PID/maps; folders have owners of their own."""
TRACKER, TRACKER_S = "multiprocessing.resource_tracker", 2.0
"""In the command line of Python's own cleaner, which unlinks the semaphores of those that were
killed, and ends when the last of them is gone; and how long that may take."""
POLL_S, LOOK_S = 0.1, 1.0
"""Between looks at the processes of the machine, and the watchdog's at whose child it is."""
NOTE_S = 5.0
"""Between its looks at the run's shared memory: what is killed before a sweep leaves no trace."""
DEAF = 'trap "" INT TERM HUP USR1 USR2; exec "$@"'
"""Runs a command that ignores signals from its first moment: what stops a run, and may be sent to
all processes of a job, must not stop its cleaning."""
CLOCK_S = 1.0
"""How coarse the time is at which a process is said to have started."""
CLOSE_S = 60.0
"""How long the end of a run may take for all that; the watchdog itself never gives up."""


def marked(variable: str, value: str) -> list[psutil.Process]:
    """The processes that were started with `variable=value`, but this one."""
    entry = f"{variable}={value}".encode()
    others = (process for process in psutil.process_iter() if process.pid != os.getpid())
    return [process for process in others if entry in environment(process)]


def environment(process: psutil.Process) -> list[bytes]:
    """The entries of a process's environment; none if it is gone, or another user's.

    Read whole: who gives itself a title may have overwritten the first entries.
    """
    try:
        return Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def sweep(variable: str, value: str, seconds: float = math.inf, noted: Iterable[Path] = ()) -> int:
    """Kill the processes that have `variable=value` until none is left; returns how many.

    Python's resource trackers go last. Their shared memory, and what was `noted` of it before, is
    removed where nobody else has it open. After `seconds` it gives up on those that the kernel does
    not let go, as with a lost disk.
    """
    killed: set[int] = set()
    files = set(noted)
    last_others = time.monotonic()
    end = last_others + seconds
    while (found := marked(variable, value)) and (now := time.monotonic()) < end:
        files |= {path for process in found for path in own_memory(process)}
        others = [process for process in found if not is_tracker(process)]
        if others:
            last_others = now
        elif now - last_others > TRACKER_S:
            others = found
        for process in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        killed |= {process.pid for process in others}
        time.sleep(POLL_S)
    if files:
        in_use = (path for process in psutil.process_iter() for path in shared_memory(process))
        for path in files.difference(in_use):
            path.unlink(missing_ok=True)
    return len(killed)


def is_tracker(process: psutil.Process) -> bool:
    """Whether it is what Python starts to clean up after processes that cannot."""
    try:
        return any(TRACKER in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def shared_memory(process: psutil.Process) -> set[Path]:
    """The files of /dev/shm that a process has mapped; those already unlinked are none."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    return {Path(name) for name in MAPPED_FILE.findall(maps)}


def own_memory(process: psutil.Process) -> set[Path]:
    """Those of them that are younger than the process: older ones were put there by others."""
    found = set()
    for path in shared_memory(process):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if path.stat().st_ctime >= process.create_time() - CLOCK_S:
                found.add(path)
    return found


class OrphanReaper:
    """The mark of one attempt, and the watchdog that outlives the process which made this.

    Example: `with OrphanReaper() as reaper: start(env={MARK: reaper.mark})`.
    """

    def __init__(self, mark: str | None = None) -> None:
        """Start the watchdog; processes started from now on inherit the mark.

        `mark` is given where processes of an attempt run on further machines.
        """
        self.mark = mark or f"{os.getpid()}-{secrets.token_hex(8)}"
        unmarked = {k: v for k, v in os.environ.items() if k not in (MARK, PART)}
        self._watchdog = subprocess.Popen(
            ["sh", "-c", DEAF, "sh", sys.executable, "-P", __file__, self.mark, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=unmarked,
            start_new_session=True,  # a ctrl-c in the driver's terminal does not reach it
        )
        inherited = {MARK: self.mark, KEEP_ENVIRONMENT: "1"}
        self._before = {name: os.environ.get(name) for name in inherited}
        os.environ |= inherited

    def close(self) -> None:
        """End whatever still has the mark, and the watchdog with it; harmless if repeated."""
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        sweep(MARK, self.mark, CLOSE_S)
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._watchdog.wait(CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def watch(mark: str, owner: int) -> None:
    """Wait for the end of process `owner`, our parent, then end everything marked.

    The pipe tells it at once, unless a forked child of the owner holds it open.
    """
    noted: set[Path] = set()
    next_look = 0.0
    while os.getppid() == owner:
        if time.monotonic() >= next_look:
            noted |= {path for process in marked(MARK, mark) for path in own_memory(process)}
            next_look = time.monotonic() + NOTE_S
        if select.select([0], [], [], LOOK_S)[0] and not os.read(0, 1):
            break
    sweep(MARK, mark, noted=noted)


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]))
