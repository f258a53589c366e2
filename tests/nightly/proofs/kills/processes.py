"""The processes of a run: all descendants of its driver, and their roles."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from pathlib import Path

import psutil

from tests.nightly.proofs.kills.schedule import Victim
from verl.machine import SHARED_MEMORY

POLL_S = 0.2
ACTOR = "ray::ActorHost"
ENGINE_CORE = "VLLM::EngineCore"
MAPPED = re.compile(rf"\s(\d+)\s+{SHARED_MEMORY}/")
"""Finds the inode in a line of /proc/PID/maps."""


class Family:
    """All descendants of a process, as far as they are found by polling every `POLL_S`.

    A child whose parent was killed is remembered, and so are its later children.
    """

    def __init__(self, pid: int) -> None:
        """Watch `pid` and its descendants until `end`."""
        self.driver = psutil.Process(pid)
        self._known: dict[tuple[int, float], psutil.Process] = {}
        self._lock = threading.Lock()
        self._add(self.driver)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _add(self, process: psutil.Process) -> None:
        self._known[process.pid, process.create_time()] = process

    def _watch(self) -> None:
        while not self._closed.wait(POLL_S):
            self.refresh()
            if not any(map(is_alive, list(self._known.values()))):
                return  # no living process can have further children

    def refresh(self) -> None:
        """Add the processes that were started since the last time."""
        children: dict[int, list[psutil.Process]] = {}
        for process in psutil.process_iter(["ppid"]):  # a single scan of all processes
            children.setdefault(process.info["ppid"], []).append(process)
        with self._lock:
            left = [process for process in self._known.values() if is_alive(process)]
            while left:
                for child in children.get(left.pop().pid, []):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        if (child.pid, child.create_time()) not in self._known:
                            self._add(child)
                            left.append(child)

    def alive(self) -> list[psutil.Process]:
        """Return all running processes, without zombies."""
        self.refresh()
        return [process for process in list(self._known.values()) if is_alive(process)]

    def find(self, victim: Victim) -> list[psutil.Process]:
        """Return the processes of a kind; empty if the run has not started them yet.

        An actor is a replica if it is the parent of an engine core, and a rank otherwise.
        """
        if victim is Victim.DRIVER:
            return [self.driver] if is_alive(self.driver) else []
        named = [(process, title(process)) for process in self.alive()]
        engines = [process for process, name in named if name.startswith(ENGINE_CORE)]
        if victim is Victim.ENGINE:
            return engines
        if not engines:
            return []  # without one, replicas and ranks cannot be distinguished
        parents = {parent_of(engine) for engine in engines}
        actors = [process for process, name in named if name.startswith(ACTOR)]
        is_replica = victim is Victim.REPLICA
        return [process for process in actors if (process.pid in parents) is is_replica]

    def wait_gone(self, seconds: float) -> list[psutil.Process]:
        """Wait until none is running; returns those that still are after `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left

    def end(self) -> None:
        """Kill all remaining processes and stop watching."""
        self._closed.set()
        self._thread.join()
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def is_alive(process: psutil.Process) -> bool:
    """Whether a process is running and not a zombie."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def title(process: psutil.Process) -> str:
    """Return a process's command line, or its title if it has set one."""
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.NoSuchProcess:
        return ""


def parent_of(process: psutil.Process) -> int | None:
    """Return the id of a process's parent; None if the process is gone."""
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return None


def shared_memory() -> set[str]:
    """Return the names in shared memory."""
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.exists() else set()


def held(names: set[str]) -> set[str]:
    """Return the names in shared memory that a living process has open or mapped.

    Mapped files are compared by inode, since a semaphore is mapped under another name.
    """
    inside: set[str] = set()
    mapped: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        paths = [path for path in _open_files(process) if path.startswith(f"{SHARED_MEMORY}/")]
        inside |= {path.split("/")[3] for path in paths}
        mapped |= _mapped_inodes(process)
    return {name for name in names if name in inside or _inode(name) in mapped}


def _open_files(process: Path) -> list[str]:
    files = []
    with contextlib.suppress(OSError):  # gone by now, or another user's
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                files.append(str(link.readlink()))
    return files


def _mapped_inodes(process: Path) -> set[int]:
    with contextlib.suppress(OSError):
        return {int(inode) for inode in MAPPED.findall((process / "maps").read_text())}
    return set()


def _inode(name: str) -> int | None:
    with contextlib.suppress(OSError):  # gone by now
        return (SHARED_MEMORY / name).stat().st_ino
    return None
