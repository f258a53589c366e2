"""The processes of a run: all that its driver ever started, and which of them is what."""

from __future__ import annotations

import contextlib
import threading
import time

import psutil

from benchmarks.kills.schedule import Victim

POLL_S = 0.2
ACTOR = "ray::ActorHost"
ENGINE_CORE = "VLLM::EngineCore"


class Family:
    """Everything that descends from one process, as far as anybody saw it live for `POLL_S`.

    A child whose parent was killed is remembered; so are the children that it then has.
    """

    def __init__(self, pid: int) -> None:
        """Watch `pid` and its descendants until `close`."""
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

    def refresh(self) -> None:
        """Take in the processes that were started since."""
        with self._lock:
            for process in list(self._known.values()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    for child in process.children():
                        self._add(child)

    def alive(self) -> list[psutil.Process]:
        """All of them that run; the dead that nobody has waited for don't count."""
        self.refresh()
        return [process for process in list(self._known.values()) if is_alive(process)]

    def find(self, victim: Victim) -> list[psutil.Process]:
        """The processes of that kind; none where the run has not come so far."""
        if victim is Victim.DRIVER:
            return [self.driver] if is_alive(self.driver) else []
        named = [(process, title(process)) for process in self.alive()]
        engines = [process for process, name in named if name.startswith(ENGINE_CORE)]
        if victim is Victim.ENGINE:
            return engines
        parents = {parent_of(engine) for engine in engines}
        actors = [process for process, name in named if name.startswith(ACTOR)]
        is_replica = victim is Victim.REPLICA
        return [process for process in actors if (process.pid in parents) is is_replica]

    def wait_gone(self, seconds: float) -> list[psutil.Process]:
        """Wait until none runs; returns those that still do after `seconds`."""
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return left

    def end(self) -> None:
        """Kill whatever is left, by force, and watch no longer."""
        self._closed.set()
        self._thread.join()
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs, and is not merely unburied."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def title(process: psutil.Process) -> str:
    """Its command line, or the title that it gave itself."""
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.NoSuchProcess:
        return ""


def parent_of(process: psutil.Process) -> int | None:
    """The id of its parent; None where it is gone."""
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return None
