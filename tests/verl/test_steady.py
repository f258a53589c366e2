"""The driver's memory: what steps touch is kept, and garbage waits for the end of a step."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref

import pytest
import torch

from verl.steady import one_thread, steady_memory


class Knot:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_waits_for_a_collection_by_hand() -> None:
    """However many objects a step makes; afterwards Python collects as it did, even on an error."""
    with pytest.raises(KeyError), steady_memory():
        knot = weakref.ref(Knot())
        assert [Knot() for _ in range(100_000)] and knot() is not None
        gc.collect()
        assert knot() is None and gc.get_freeze_count() > 0
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_what_was_off_stays_off() -> None:
    """A program that collects by hand itself is left so."""
    gc.disable()
    try:
        with steady_memory():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_threads_come_back() -> None:
    """One inside, as many as before afterwards."""
    usual = torch.get_num_threads()
    with pytest.raises(KeyError), one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == usual


NEW_PAGES = """
import resource
import torch
from verl.steady import steady_memory

def new_pages(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def least():
    for size in (1 << 24, 1 << 20):
        print(min(new_pages(size) for _ in range(20)))

least()
with steady_memory():
    least()
least()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_pages_are_touched_once() -> None:
    """After some tensors of 64 MB one more needs no new pages; before and afterwards each needs all
    of them, but those of 4 MB, which malloc keeps, do not.

    Some, for glibc keeps seven of the small rests beside a chunk, which then fits no second time.
    In a process of its own, for what another test has freed is memory that needs no new pages.
    """
    done = subprocess.run([sys.executable, "-c", NEW_PAGES], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    large, small = (list(map(int, done.stdout.split()[start::2])) for start in range(2))
    assert large[0] > 10_000 and large[1] < 1000 and large[2] > 10_000
    assert max(small) < 100
