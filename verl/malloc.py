"""Settings of glibc's malloc for a process with large tensors that come and go."""

import contextlib
import ctypes
from collections.abc import Iterator

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


def _configure_malloc(settings: dict[int, int]) -> None:
    """Set malloc's parameters if it is glibc's; other libraries have no mallopt."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in settings.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)
