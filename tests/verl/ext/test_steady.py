"""Steady memory: freed memory is kept, and garbage is collected on demand only."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch

from verl.ext.steady import one_thread, steady_memory


class Cycle:
    """A reference cycle, which only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """Unfreezes the imported modules that `tests/conftest.py` has frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_garbage_is_collected_on_demand_only() -> None:
    """However many objects are created; the collector is restored afterwards, even on errors."""
    with pytest.raises(KeyError), steady_memory():
        cycle = weakref.ref(Cycle())
        assert [Cycle() for _ in range(100_000)] and cycle() is not None
        gc.collect()
        assert cycle() is None and gc.get_freeze_count() > 0
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_what_the_program_froze_stays_frozen() -> None:
    """A second run then need not traverse it, and collects what is frozen in neither."""
    mine = Cycle()
    frozen = weakref.ref(mine)
    gc.freeze()
    del mine  # garbage that a collector would free, were it not frozen
    for _ in range(2):
        with steady_memory():
            cycle = weakref.ref(Cycle())
            assert cycle() is not None
        assert gc.get_freeze_count() > 100_000  # the imported modules
        gc.collect()
        assert cycle() is None and frozen() is not None


def test_a_disabled_collector_stays_disabled() -> None:
    """A program may manage garbage collection itself."""
    gc.disable()
    try:
        with steady_memory():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_number_of_threads_is_restored() -> None:
    """It is one inside, and the previous number afterwards."""
    previous = torch.get_num_threads()
    with pytest.raises(KeyError), one_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == previous


NEW_PAGES = """
import resource
import torch
from verl.ext.steady import steady_memory

def new_pages(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def print_minimum():
    for size in (1 << 24, 1 << 20):
        print(min(new_pages(size) for _ in range(12)))

print_minimum()
with steady_memory():
    print_minimum()
print_minimum()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_pages_are_reused() -> None:
    """After some tensors of 64 MB, another needs no new pages; without `steady_memory` each does.

    Tensors of 4 MB never do, since malloc keeps their memory.
    It takes some tensors, since glibc keeps seven small remainders beside a chunk, which then does
    not fit again. It runs in a subprocess, since memory freed by other tests needs no new pages.
    """
    done = subprocess.run([sys.executable, "-c", NEW_PAGES], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    large, small = (list(map(int, done.stdout.split()[start::2])) for start in range(2))
    assert large[0] > 10_000 and large[1] < 1000 and large[2] > 10_000
    assert max(small) < 100
