"""Kills every process that a run started when the run ends, however it ends.

Each attempt of a run has a mark: an environment variable that every process it starts inherits, so
that Ray's daemons, actors, engine cores and their workers are found wherever they are in the
process tree. A small separate process, the watchdog, holds the reading end of a pipe whose writing
end the driver holds. When the driver ends, even by SIGKILL, the pipe closes, and the watchdog kills
all processes that have the mark and removes the shared memory they created. Processes of other runs
have other marks and are never touched.

This file is also the watchdog's program; it imports little, so that it starts fast and stays small.
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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from verl.single_controller.actors import RayWorkerGroup
    from verl.trainer.groups import StartUp

MARK = "SEARCH_R1_RUN"
"""Environment variable with the mark of the attempt that a process belongs to."""
REPLICA_MARK = "SEARCH_R1_PART"
"""Environment variable of a replica's processes, which can be replaced alone: `MARK/replica-N`."""
KEEP_ENVIRONMENT = "SPT_NOENV"
"""Keeps Ray and vLLM from overwriting the environment when they set process titles. Actors in a
user's own Ray cluster do not inherit it from the driver."""
MAPPED_FILE = re.compile(r"\s(/dev/shm/[^/\s]+)$", re.MULTILINE)
"""A file directly in /dev/shm, in a line of /proc/PID/maps; folders there have other owners."""
RESOURCE_TRACKER = "multiprocessing.resource_tracker"
"""In the command line of Python's resource trackers, which unlink the semaphores of killed
processes and end when the last of these is gone."""
TRACKER_GRACE_S = 2.0
"""Seconds that resource trackers get for it before they are killed too."""
POLL_S = 0.1
"""Seconds between two scans for marked processes while killing them."""
OWNER_POLL_S = 1.0
"""Seconds between two checks of the watchdog whether its owner is still its parent."""
RECORD_INTERVAL_S = 5.0
"""Seconds between the watchdog's recordings of the run's shared memory, without which the memory of
a process that died before the others would not be known."""
IGNORE_SIGNALS = 'trap "" INT TERM HUP USR1 USR2; exec "$@"'
"""Shell code that runs a command with signals ignored from the start. A signal that stops a run may
be sent to all processes of a job, and must not stop its cleanup."""
CLOCK_TOLERANCE_S = 1.0
"""Precision of a process's start time, in seconds."""
CLOSE_TIMEOUT_S = 60.0
"""Seconds that `close` waits for the cleanup; the watchdog itself never gives up."""


def find_marked(variable: str, value: str) -> list[psutil.Process]:
    """Return the processes that were started with `variable=value`, except this one."""
    entry = f"{variable}={value}".encode()
    others = (process for process in psutil.process_iter() if process.pid != os.getpid())
    return [process for process in others if entry in environment(process)]


def environment(process: psutil.Process) -> list[bytes]:
    """Return the entries of a process's environment; empty if it is gone or another user's."""
    try:  # not only the first entries, which a process that sets its title may have overwritten
        return Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def kill_marked(
    variable: str, value: str, seconds: float = math.inf, recorded: Iterable[Path] = ()
) -> int:
    """Kill the processes that have `variable=value` until none is left; returns their number.

    Python's resource trackers are killed last. Shared memory that the processes created, and the
    files `recorded` before, are removed unless another process has them mapped. Gives up after
    `seconds` on processes that the kernel does not let die, for example with a lost disk.
    """
    killed: set[int] = set()
    files = set(recorded)
    only_trackers_since = time.monotonic()
    end = only_trackers_since + seconds
    while (marked := find_marked(variable, value)) and (now := time.monotonic()) < end:
        files |= {path for process in marked for path in created_shared_memory(process)}
        targets = [process for process in marked if not is_tracker(process)]
        if targets:
            only_trackers_since = now
        elif now - only_trackers_since > TRACKER_GRACE_S:
            targets = marked
        for process in targets:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        killed |= {process.pid for process in targets}
        time.sleep(POLL_S)
    if files:
        in_use = (path for process in psutil.process_iter() for path in shared_memory(process))
        for path in files.difference(in_use):
            path.unlink(missing_ok=True)
    return len(killed)


def is_tracker(process: psutil.Process) -> bool:
    """Whether a process is Python's resource tracker."""
    try:
        return any(RESOURCE_TRACKER in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def shared_memory(process: psutil.Process) -> set[Path]:
    """Return the files of /dev/shm that a process has mapped, without those already unlinked."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    return {Path(name) for name in MAPPED_FILE.findall(maps)}


def created_shared_memory(process: psutil.Process) -> set[Path]:
    """Return the files of /dev/shm that a process has mapped and that are younger than itself."""
    created = set()
    for path in shared_memory(process):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if path.stat().st_ctime >= process.create_time() - CLOCK_TOLERANCE_S:
                created.add(path)
    return created


class OrphanReaper:
    """Marks the processes of one attempt and kills them when this process ends.

    Example: `with OrphanReaper() as reaper: start(env={MARK: reaper.mark})`.
    """

    def __init__(self, mark: str | None = None, record_every: float = RECORD_INTERVAL_S) -> None:
        """Start the watchdog; processes started from now on inherit the mark.

        `mark` is given on the further machines of an attempt. The watchdog records the run's shared
        memory every `record_every` seconds.
        """
        self.mark = mark or f"{os.getpid()}-{secrets.token_hex(8)}"
        unmarked = {k: v for k, v in os.environ.items() if k not in (MARK, REPLICA_MARK)}
        arguments = [self.mark, str(os.getpid()), str(record_every)]
        watchdog = [sys.executable, "-P", __file__, *arguments]
        self._watchdog = subprocess.Popen(
            ["sh", "-c", IGNORE_SIGNALS, "sh", *watchdog],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=unmarked,
            start_new_session=True,  # a ctrl-c in the driver's terminal does not reach it
        )
        self._before = {name: os.environ.get(name) for name in self.variables}
        os.environ |= self.variables

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the processes that belong to the attempt."""
        return {MARK: self.mark, KEEP_ENVIRONMENT: "1"}

    def unmark(self) -> None:
        """Let further processes start without the mark; those that have it keep it."""
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        self._before = {}

    def close(self) -> None:
        """Kill all marked processes and end the watchdog; harmless if repeated."""
        self.unmark()
        kill_marked(MARK, self.mark, CLOSE_TIMEOUT_S)
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._watchdog.wait(CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def add_to(start_up: StartUp) -> None:
    """Mark the processes of the attempt that starts, and kill them all when it ends."""
    reaper = start_up.end.enter_context(OrphanReaper())
    start_up.variables.append(lambda config, nodes: reaper.variables)
    start_up.replica_variables = lambda replica: {REPLICA_MARK: f"{reaper.mark}/replica-{replica}"}
    start_up.on_started.append(lambda groups: guard_nodes(reaper.mark, groups))
    start_up.clean_up = kill_leftovers


def guard_nodes(mark: str, groups: Sequence[RayWorkerGroup]) -> None:
    """Start a reaper on each node except the driver's, which has one already."""
    import ray  # noqa: PLC0415 - the watchdog, whose program this file is too, starts without

    guarded = {ray.get_runtime_context().get_node_id()}
    for group in groups:
        nodes = [location.node_id for location in group.locations()]
        new = [node for node in dict.fromkeys(nodes) if node not in guarded]
        group.run(guard_node, mark, on=[nodes.index(node) for node in new])
        guarded |= set(new)


_of_this_process: list[OrphanReaper] = []


def guard_node(mark: str) -> None:
    """Have the processes marked `mark` on this node killed when this process ends."""
    _of_this_process.append(OrphanReaper(mark))


def kill_leftovers() -> None:
    """Kill the remaining processes of the replica that this process replaces."""
    kill_marked(REPLICA_MARK, os.environ[REPLICA_MARK])


def watch(mark: str, owner: int, record_every: float) -> None:
    """Wait for process `owner`, the parent of this one, to end, then kill all marked processes."""
    recorded: set[Path] = set()
    next_recording = 0.0
    while os.getppid() == owner:
        if time.monotonic() >= next_recording:
            marked = find_marked(MARK, mark)
            recorded |= {path for process in marked for path in created_shared_memory(process)}
            next_recording = time.monotonic() + record_every
        # The pipe closes when the owner ends, unless a forked child of it holds the pipe open.
        if select.select([0], [], [], OWNER_POLL_S)[0] and not os.read(0, 1):
            break
    kill_marked(MARK, mark, recorded=recorded)


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
