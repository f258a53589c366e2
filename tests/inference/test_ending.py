"""However a command with an engine is ended, nothing of the engine stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from search_r1.inference.ending import SIGNALS, exits_at_signals
from search_r1.inference.model import running_engine
from verl.config import Config
from verl.engine import RolloutEngine
from verl.ext.reaper import MARK
from verl.types import Completion, Sampling

DRIVER = """
import asyncio, signal, subprocess, sys, tempfile
from search_r1.inference.ending import SIGNALS, ending_processes, exits_at_signals

for number in SIGNALS:  # nohup ignores one of them
    signal.signal(number, signal.SIG_DFL)

def start(**how):
    return subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, **how).pid

async def serve():
    with ending_processes() as starting:
        with starting:
            engine = start(start_new_session=True)
        own = start()  # not the engine's
        try:
            print(engine, own, flush=True)
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            print("shut down", flush=True)

@exits_at_signals()
def main():
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        asyncio.run(serve())

main()
"""
"""Has an engine with a process of its own, a temporary folder, and another process."""


class Driver:
    """The driver's process and its two children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "models"
        self.folder.mkdir()
        program = folder / "driver.py"
        program.write_text(DRIVER)
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, str(program), str(self.folder)], stdout=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": str(root)},
        )  # fmt: skip
        assert self.process.stdout is not None
        engine, own = self.process.stdout.readline().split()
        self.engine, self.own = psutil.Process(int(engine)), psutil.Process(int(own))


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    """Start the driver; end what is left of it."""
    started = Driver(tmp_path)
    yield started
    for process in (started.process, started.own):
        process.kill()
    started.process.wait()


def is_gone(process: psutil.Process) -> bool:
    """Whether a process ends within ten seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_shuts_the_engine_down(driver: Driver, number: signal.Signals) -> None:
    """The engine is asked to end, temporary models are removed, and the status tells the signal."""
    driver.process.send_signal(number)
    output, _ = driver.process.communicate(timeout=30)
    assert (driver.process.returncode, output) == (128 + number, "shut down\n")
    assert is_gone(driver.engine) and [*driver.folder.iterdir()] == []
    assert driver.own.is_running()


def test_not_even_sigkill_leaves_the_engines_processes(driver: Driver) -> None:
    """They are killed; what the program itself started after the engine is not."""
    driver.process.kill()
    assert is_gone(driver.engine)
    assert driver.own.is_running()


class Engine(RolloutEngine):
    """An engine whose shutdown forgets a process."""

    @classmethod
    def from_config(cls, config: Config, replica: int = 0) -> Engine:
        return cls()

    async def start(self) -> None:
        self.process = start_sleep()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        raise NotImplementedError


def start_sleep() -> psutil.Process:
    return psutil.Process(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)


def test_an_engines_processes_end_with_it() -> None:
    """Those started while the engine runs are not its own, and have no mark."""
    config = Config()
    config.actor_rollout_ref.rollout.name = f"{__file__}:Engine"

    async def run() -> tuple[psutil.Process, psutil.Process]:
        async with running_engine(config) as engine:
            process: psutil.Process = engine.process  # type: ignore[attr-defined]
            return process, start_sleep()

    process, own = asyncio.run(run())
    assert is_gone(process)
    assert f"{MARK}=".encode() not in Path(f"/proc/{own.pid}/environ").read_bytes()
    own.kill()


def test_handlers_are_those_of_before_again() -> None:
    """An ignored signal stays ignored in the body, and another thread changes nothing."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        default = signal.getsignal(signal.SIGTERM)
        with exits_at_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != default
            with pytest.raises(SystemExit) as left:
                signal.raise_signal(signal.SIGTERM)
            assert left.value.code == 128 + signal.SIGTERM
            assert signal.getsignal(signal.SIGTERM) == default, "a second one ends at once"
        assert signal.getsignal(signal.SIGTERM) == default
    finally:
        signal.signal(signal.SIGHUP, before)

    def elsewhere() -> None:
        with exits_at_signals():
            assert signal.getsignal(signal.SIGTERM) == default
        done.append(True)

    done: list[bool] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done == [True]
