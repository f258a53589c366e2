"""Times of the stages of a search: engines name the stages, the server collects the seconds.

Outside `collect` a stage costs next to nothing, so engines need not know who is asking.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Seconds = dict[str, float]

_collected: ContextVar[Seconds | None] = ContextVar("collected", default=None)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Add the wall time (s) of the block to stage `name`: encode, search, documents, rerank ..."""
    seconds = _collected.get()
    if seconds is None:
        yield
        return
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def collect() -> Iterator[Seconds]:
    """Gather the stages of everything called in the block, in this thread."""
    seconds: Seconds = {}
    token = _collected.set(seconds)
    try:
        yield seconds
    finally:
        _collected.reset(token)
