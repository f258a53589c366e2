"""A process's memory, kept once touched; the driver's, collected between steps; its threads.

What a step of the driver costs a trajectory is else not the same for all sizes of a step. Columns
of a large batch are pages that malloc gives back and the kernel clears anew, and Python collects
garbage by how many objects are made: a step of 20,000 trajectories makes millions, all of which go
without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterator

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Of mallopt(3), in malloc.h."""
NEVER, USUAL = (
    {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1},
    {M_MMAP_MAX: 1 << 16, M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20},
)
"""When memory goes back to the system. Usual is what malloc comes to by itself where large tensors
are freed; it no longer does once anything was set."""


@contextlib.contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Inside of it no memory is given back."""
    _give_back(NEVER)
    try:
        yield
    finally:
        _give_back(USUAL)  # to a program that goes on after its run


@contextlib.contextmanager
def steady_memory() -> Iterator[None]:
    """Inside of it no memory is given back and no garbage is collected but by `gc.collect`, which
    passes over all that was there before."""
    was_enabled = gc.isenabled()
    with keep_freed_memory():
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            yield
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside of it torch computes with one thread: columns of numbers gain nothing by more, which
    wait for each other by spinning, and sums are the same whatever the number of cores."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def _give_back(when: dict[int, int]) -> None:
    """Tell malloc, where it is glibc's; others have no such function."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in when.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)
