"""Memory allocators for processes with large tensors that come and go.

Such a process keeps freed memory, because returning it to the system after each forward pass costs
more in page faults than the pass itself. glibc's malloc then searches its free pieces one by one,
and with dialogues of many lengths there are ever more of them: after 42 updates of real questions
one took three times as long (docs/evidence/updates.md). jemalloc, of which Ray's wheels contain a
copy, has them by size.
"""

import contextlib
import ctypes
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
"""Parameters of mallopt(3), from malloc.h."""
KEEP_FREED = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1}
"""malloc settings by which freed memory is never returned to the system."""
RETURN_FREED = {M_MMAP_MAX: 1 << 16, M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 64 << 20}
"""glibc's own values once large tensors were freed; it no longer adapts after any mallopt call."""

NVIDIA = Path("/dev/nvidiactl")
"""Device file of the driver."""
JEMALLOC = {
    "MALLOC_CONF": "dirty_decay_ms:60000,muzzy_decay_ms:60000,oversize_threshold:0,"
    "thp:always,narenas:1"
}
"""Freed memory is kept for a minute, in one arena of huge pages for threads that take turns."""
GLIBC = {
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_ARENA_MAX": "1",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""The same without jemalloc. Ray calls an actor in a thread, whose own arena would be returned."""


def malloc_env() -> dict[str, str]:
    """Return the environment variables with which a process keeps freed memory.

    A user's values of the same variables, and a preloaded allocator of theirs, take precedence.
    """
    preloaded, library = os.environ.get("LD_PRELOAD", ""), _jemalloc()
    if library is not None and str(library) in preloaded:
        found = {"LD_PRELOAD": preloaded, **JEMALLOC}
    elif library is None or "malloc" in preloaded:
        found = dict(GLIBC)
    else:
        found = {"LD_PRELOAD": ":".join(filter(None, (str(library), preloaded))), **JEMALLOC}
    return found | {k: os.environ[k] for k in found if k in os.environ and k != "LD_PRELOAD"}


def rerun_with_malloc(program: str) -> None:
    """Run this process again with the variables, which only work from its beginning.

    Only if `python -m program` is what the process was started with, not if that is called in it;
    and not beside a GPU, which computes then.
    """
    spec = sys.modules["__main__"].__spec__
    if spec is None or spec.name != program or NVIDIA.exists():
        return
    wanted = malloc_env()
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | wanted)


def _jemalloc() -> Path | None:
    """Return Ray's copy of jemalloc, or None if the installed wheel has none."""
    spec = importlib.util.find_spec("ray")
    if spec is None or spec.origin is None:
        return None
    library = Path(spec.origin).parent / "core" / "libjemalloc.so"
    return library if library.is_file() else None


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
