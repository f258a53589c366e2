"""Steady step times: keeping freed memory, garbage collection between steps, one torch thread.

Otherwise the driver's cost per trajectory grows with the size of a step: malloc returns the memory
of a large batch's columns, which the kernel then clears anew; and Python runs its collector by the
number of new objects, of which a step of 20,000 trajectories makes millions, all freed without it.
"""

import contextlib
import ctypes
import gc
from collections.abc import Iterator

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Parameters of mallopt(3), from malloc.h."""
KEEP_FREED = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1}
"""malloc settings by which freed memory is never returned to the system."""
RETURN_FREED = {M_MMAP_MAX: 1 << 16, M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20}
"""glibc's own values once large tensors were freed; it no longer adapts after any mallopt call."""


@contextlib.contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep freed memory in this process instead of returning it to the system."""
    _configure_malloc(KEEP_FREED)
    try:
        yield
    finally:
        _configure_malloc(RETURN_FREED)  # for a program that continues after its run


@contextlib.contextmanager
def steady_memory() -> Iterator[None]:
    """Keep freed memory; collect garbage by `gc.collect` only, which ignores all older objects."""
    # Objects that the program has frozen stay frozen: each run of several would traverse them.
    was_enabled, had_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    with keep_freed_memory():
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            yield
        finally:
            if not had_frozen:
                gc.unfreeze()
            if was_enabled:
                gc.enable()


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread, so that sums do not depend on the number of cores."""
    previous = torch.get_num_threads()
    # The driver's columns gain nothing from more threads, which spin while they wait.
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def _configure_malloc(settings: dict[int, int]) -> None:
    """Set malloc's parameters if it is glibc's; other libraries have no mallopt."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in settings.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)
