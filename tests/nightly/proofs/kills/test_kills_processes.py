"""The search for the processes of a run."""

import multiprocessing.shared_memory
import subprocess
import sys
import time

import psutil
import pytest

from tests.nightly.proofs.kills.processes import Family, held, shared_memory
from tests.nightly.proofs.kills.schedule import Victim
from verl.machine import SHARED_MEMORY

PARENT = """
import subprocess, sys, time
child = "import sys, time; time.sleep(60)"
subprocess.Popen(["{name}", "-c", child], executable=sys.executable)
time.sleep(60)
"""


def start(name: str) -> tuple["subprocess.Popen[bytes]", Family]:
    process = subprocess.Popen([sys.executable, "-c", PARENT.format(name=name)])
    return process, Family(process.pid)


def wait_for_child(family: Family) -> psutil.Process:
    deadline = time.monotonic() + 30
    while len(alive := family.alive()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive[1]


def test_an_orphan_still_belongs_to_the_family() -> None:
    """A process whose parent was killed is found and ended."""
    process, family = start("x")
    child = wait_for_child(family)
    process.kill()
    process.wait()
    assert family.alive() == [child]
    assert family.wait_gone(0.0) == [child]
    family.end()
    assert family.wait_gone(30.0) == []


def test_victims_are_known_by_their_titles() -> None:
    """Driver and engine core are found, and no rank, because there is none."""
    process, family = start("VLLM::EngineCore")
    child = wait_for_child(family)
    try:
        assert family.find(Victim.ENGINE) == [child]
        assert [found.pid for found in family.find(Victim.DRIVER)] == [process.pid]
        assert family.find(Victim.RANK) == []
    finally:
        process.kill()
        process.wait()
        family.end()


@pytest.mark.skipif(not SHARED_MEMORY.exists(), reason="no /dev/shm on this system")
def test_shared_memory_in_use_is_distinguished_from_leftovers() -> None:
    """Memory that a process has mapped is in use, under any of its names; other memory is not."""
    block = multiprocessing.shared_memory.SharedMemory(create=True, size=64)
    left, other = (SHARED_MEMORY / f"{block.name}-{name}" for name in ("left", "other"))
    left.touch()
    other.hardlink_to(SHARED_MEMORY / block.name)
    try:
        names = {block.name, left.name, other.name}
        assert names <= shared_memory()
        assert held(names) == {block.name, other.name}
    finally:
        left.unlink()
        other.unlink()
        block.close()
        block.unlink()
