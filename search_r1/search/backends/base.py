"""What every retriever backend offers: ranked hits, its identity, and the times of its stages."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from search_r1.search.schema import Hit

Seconds = dict[str, float]
"""Wall time by stage of a search: encode, search, documents, rerank ..."""
_collected: ContextVar[Seconds | None] = ContextVar("collected", default=None)


class Retriever(Protocol):
    """A retriever backend; the server calls it from at most `num_threads` threads at once.

    The `corpus` of one that has such a part is asked for single documents, too.
    """

    name: str
    num_threads: int
    """Threads that may search at once: 1 for an index, more where a search waits for a network."""
    num_documents: int
    """Documents that can be found; 0 where nobody can know."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """At most `k` hits per query, best first, ties by row; one list per query in order."""
        ...

    def info(self) -> dict[str, Any]:
        """JSON-ready facts for `/info`: all that decides an answer, no times and no paths."""
        ...


def fingerprint(facts: Mapping[str, Any]) -> str:
    """64-bit BLAKE2b hash (hex) of a backend's `info()`: the key of caches and of records."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Add the time of the block to stage `name`; next to nothing outside `collect`."""
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
