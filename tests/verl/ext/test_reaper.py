"""All processes that a run started end with it, and no others do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from verl.ext import reaper
from verl.ext.reaper import (
    CLOCK_TOLERANCE_S,
    KEEP_ENVIRONMENT,
    MARK,
    OrphanReaper,
    find_marked,
    guard_nodes,
    kill_marked,
    shared_memory,
)
from verl.single_controller.actors import ActorLocation

ROOT = Path(__file__).resolve().parents[3]
DRIVER = """
import subprocess, sys, time
from verl.ext.reaper import OrphanReaper
reaper = OrphanReaper()
subprocess.Popen(["sh", "-c", "setsid sleep 600 & exec sleep 600"])
print(reaper.mark, flush=True)
time.sleep(600)
"""


def wait_until(holds: Callable[[], bool]) -> None:
    """Poll until the condition holds; the suite's time limit ends a test that waits for ever."""
    while not holds():
        time.sleep(0.05)


def start_driver(program: str = DRIVER) -> tuple[subprocess.Popen[str], str]:
    """Start a process with a reaper, a child, and a grandchild in a separate session."""
    words = [sys.executable, "-c", program]
    driver = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    mark = driver.stdout.readline().strip()
    wait_until(lambda: len(find_marked(MARK, mark)) == 2)
    return driver, mark


def watchdogs(mark: str) -> list[int]:
    """Return the process ids of a mark's watchdogs."""
    processes = psutil.process_iter(["cmdline"])
    return [p.pid for p in processes if mark in (p.info["cmdline"] or [])]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_all_is_gone_after_the_driver(number: signal.Signals) -> None:
    """However the driver ends, its processes end, detached or not, and the watchdog last."""
    driver, mark = start_driver()
    other, other_mark = start_driver()
    assert len(watchdogs(mark)) == 1
    driver.send_signal(number)
    driver.wait()
    wait_until(lambda: not find_marked(MARK, mark) and not watchdogs(mark))
    assert len(find_marked(MARK, other_mark)) == 2, "another run was touched"
    other.kill()
    other.wait()
    wait_until(lambda: not find_marked(MARK, other_mark) and not watchdogs(other_mark))


def test_a_forked_child_does_not_keep_the_watchdog_waiting() -> None:
    """The child inherits the driver's end of the pipe, which then stays open."""
    fork = "import os\nos.fork() or print(os.getpid(), flush=True)\ntime.sleep(600)"
    driver, mark = start_driver(DRIVER.replace("time.sleep(600)", fork))
    assert driver.stdout is not None
    forked = psutil.Process(int(driver.stdout.readline()))
    driver.kill()
    driver.wait()
    wait_until(lambda: not find_marked(MARK, mark) and not watchdogs(mark))
    assert forked.is_running()
    forked.kill()


def test_a_process_that_gave_itself_a_title_is_found() -> None:
    """Process titles, as Ray and vLLM set them, must not overwrite the mark."""
    setproctitle = pytest.importorskip("setproctitle")
    mark = f"titled-{os.getpid()}"
    program = "import time, setproctitle as s; s.setproctitle('a title'); time.sleep(600)"
    path = str(Path(setproctitle.__file__).parents[1])
    environment = {KEEP_ENVIRONMENT: "1", MARK: mark, "PYTHONPATH": path}
    titled = subprocess.Popen([sys.executable, "-c", program], env=environment)
    wait_until(lambda: "a title" in "".join(psutil.Process(titled.pid).cmdline()))
    assert kill_marked(MARK, mark) == 1
    assert titled.wait() == -signal.SIGKILL


def test_signals_that_stop_a_run_do_not_stop_its_cleanup() -> None:
    """A batch system sends SIGTERM to all processes; the watchdog ignores it and cleans up."""
    driver, mark = start_driver()
    (watchdog,) = watchdogs(mark)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(watchdog, number)
    driver.kill()
    driver.wait()
    wait_until(lambda: not find_marked(MARK, mark) and not watchdogs(mark))


def test_closing_kills_what_is_left_and_restores_the_environment() -> None:
    """A second attempt starts without processes of the first; this process is not killed."""
    assert MARK not in os.environ
    with OrphanReaper() as first:
        assert os.environ[KEEP_ENVIRONMENT] == "1"
        left = subprocess.Popen(["setsid", "sleep", "600"])
        wait_until(lambda: len(find_marked(MARK, first.mark)) == 1)
    assert left.wait() == -signal.SIGKILL
    assert find_marked(MARK, first.mark) == []
    assert MARK not in os.environ
    assert watchdogs(first.mark) == []


MAPPER = """
import mmap, pathlib, sys, time
for name in sys.argv[1:]:
    path = pathlib.Path(name)
    path.exists() or path.write_bytes(b"x" * 4096)
files = [open(name, "r+b") for name in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 0) for file in files]
time.sleep(600)
"""
"""Creates the missing files and maps all files."""


def test_only_the_shared_memory_of_the_killed_is_removed() -> None:
    """Files that killed processes created and no other process has mapped; older files stay."""
    made, shared, older = (Path(f"/dev/shm/search-r1-test-{os.getpid()}-{x}") for x in "abc")
    older.write_bytes(b"x" * 4096)
    time.sleep(2 * CLOCK_TOLERANCE_S + 0.5)
    mark = f"test-{os.getpid()}"
    names = [str(path) for path in (made, shared, older)]
    marked = subprocess.Popen([sys.executable, "-c", MAPPER, *names], env={MARK: mark})
    keeper = None
    try:
        wait_until(lambda: any(len(shared_memory(p)) == 3 for p in find_marked(MARK, mark)))
        keeper = subprocess.Popen([sys.executable, "-c", MAPPER, str(shared)])
        wait_until(lambda: shared in shared_memory(psutil.Process(keeper.pid)))
        assert kill_marked(MARK, mark) == 1
        assert marked.wait() == -signal.SIGKILL
        assert [path.exists() for path in (made, shared, older)] == [False, True, True]
    finally:
        for process in filter(None, (marked, keeper)):
            process.kill()
            process.wait()
        for path in (made, shared, older):
            path.unlink(missing_ok=True)


def test_shared_memory_of_a_process_that_died_before_is_removed_with_the_run() -> None:
    """The watchdog recorded it while it was in use; for example, an engine's semaphores."""
    made = Path(f"/dev/shm/search-r1-test-{os.getpid()}-died")
    with OrphanReaper(record_every=0.1) as run:
        wait_until(lambda: bool(watchdogs(run.mark)))
        (watchdog,) = watchdogs(run.mark)
        died = subprocess.Popen([sys.executable, "-c", MAPPER, str(made)], env={MARK: run.mark})
        wait_until(lambda: made in shared_memory(psutil.Process(died.pid)))
        # It waits once, giving up its core, between two recordings.
        waits = psutil.Process(watchdog).num_ctx_switches().voluntary + 3
        wait_until(lambda: psutil.Process(watchdog).num_ctx_switches().voluntary >= waits)
        assert psutil.pid_exists(watchdog)
        died.kill()
        died.wait()
        assert made.exists()
    assert not made.exists()


def test_semaphores_are_left_to_pythons_resource_tracker() -> None:
    """It unlinks the semaphores of a process that was killed before, and then ends."""
    program = (
        "import multiprocessing, time\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print(lock._semlock.name, flush=True)\n"
        "time.sleep(600)"
    )
    mark = f"test-{os.getpid()}"
    killed = subprocess.Popen(
        [sys.executable, "-c", program], env={MARK: mark}, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    semaphore = Path("/dev/shm") / f"sem.{killed.stdout.readline().strip().removeprefix('/')}"
    assert semaphore.exists()
    wait_until(lambda: len(find_marked(MARK, mark)) == 2)
    killed.kill()
    killed.wait()
    kill_marked(MARK, mark)
    assert not semaphore.exists()
    assert find_marked(MARK, mark) == []


def test_a_resource_tracker_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After its grace period; nothing of the run is left."""
    monkeypatch.setattr(reaper, "TRACKER_GRACE_S", 0.3)
    mark = f"test-{os.getpid()}"
    program = "import time; time.sleep(600)  # multiprocessing.resource_tracker"
    stubborn = subprocess.Popen([sys.executable, "-c", program], env={MARK: mark})
    wait_until(lambda: bool(find_marked(MARK, mark)))
    assert kill_marked(MARK, mark) == 1
    assert stubborn.wait() == -signal.SIGKILL


def group_on(where: str, name: str, guarded: list[tuple[str, int, str]]) -> Any:
    """Return a group with an actor on each of the nodes, which records the guards it starts."""
    locations = [ActorLocation(node, "host", ()) for node in where]

    def run(function: Callable[[str], None], mark: str, on: Sequence[int]) -> None:
        guarded.extend((name, i, mark) for i in on)

    return SimpleNamespace(locations=lambda: locations, run=run)


def test_each_node_but_the_drivers_gets_one_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's first rank starts it; the driver's node has one; groups share their nodes'."""
    guarded: list[tuple[str, int, str]] = []
    context = SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    groups = [group_on("abb", "rank", guarded), group_on("abbcc", "critic rank", guarded)]
    guard_nodes("mark", groups)
    assert guarded == [("rank", 1, "mark"), ("critic rank", 3, "mark")]
