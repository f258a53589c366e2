"""How many searches of a task had to be tried again: for metrics, beside what a search finds.

A context variable carries the count, so that `Retrieval.search` stays a function of a query and a
request that serves many trajectories still tells each of them.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

RETRIED = "searches_retried"
"""Searches that one attempt was not enough for, whether or not they were answered then."""

_counts: ContextVar[Counter[str] | None] = ContextVar("counts", default=None)


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """What `note` tells of the searches that the body awaits."""
    counts = Counter({RETRIED: 0})
    token = _counts.set(counts)
    try:
        yield counts
    finally:
        _counts.reset(token)


def note(num_retries: int) -> None:
    """One search is over, after so many further attempts; nothing is kept where nobody counts."""
    counts = _counts.get()
    if counts is not None:
        counts[RETRIED] += int(num_retries > 0)
