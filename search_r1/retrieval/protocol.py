"""The interface through which agents search, and the implementation that finds nothing."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from search_r1.retrieval.schema import Document


class Retrieval(Protocol):
    """Interface of a retriever as an agent uses it."""

    async def search(self, query: str) -> list[Document]:
        """Return the documents, best first; raises SearchError for an infrastructure failure."""


class EmptyRetrieval:
    """Finds nothing; measures an agent without documents."""

    async def search(self, query: str) -> list[Document]:
        return []


RETRIED = "searches_retried"
"""Name of the count of searches that needed more than one attempt, successful or not."""
_counts: ContextVar[Counter[str] | None] = ContextVar("counts", default=None)


@contextmanager
def count_retries() -> Iterator[Counter[str]]:
    """Count, under the key RETRIED, the searches awaited in the body that needed a retry."""
    counts = Counter({RETRIED: 0})
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)


def add_retried(number: int) -> None:
    """Add to the count of the `count_retries` around the call, if there is one."""
    if (counts := _counts.get()) is not None:
        counts[RETRIED] += number
