"""The protocol of retriever backends, and stage timing."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from search_r1.retrieval.schema import Hit

if TYPE_CHECKING:  # online engines need no numpy
    from search_r1.retrieval.corpus import Corpus, Mask

Ranking = tuple[list[list[float]], list[list[int]]]
Filter = tuple[tuple[str, ...], ...]
"""For each field the keys (`fields.key`) of which a hit must have one; () limits nothing."""
Seconds = dict[str, float]
"""Wall time of each stage of a search: encode, search, documents, rerank ..."""
_collected: ContextVar[Seconds | None] = ContextVar("collected", default=None)


class Retriever(Protocol):
    """A retriever backend; the server calls it from at most `num_threads` threads at once.

    A backend may also have a `corpus` attribute, from which the server reads single documents,
    `cuts`, the counts of texts that were longer than a model's input, `explain(query, k)`, which
    returns for each hit the named parts that its score is the sum of, and `filter_fields` with
    `filtered(filter)`, which returns a backend of the passages that a filter leaves.
    """

    name: str
    num_threads: int
    """Threads that may search at once: 1 for an index, more if a search waits for the network."""
    num_documents: int
    """Number of documents that can be found; 0 if unknown."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return at most `k` hits for each query in turn, best first, ties by row."""

    def info(self) -> dict[str, Any]:
        """Return JSON-ready facts for `/info`: all that affects results, but no times or paths."""


class RowRetriever:
    """A backend that ranks the rows of a corpus, whose documents are then read."""

    name: str
    num_documents: int
    corpus: "Corpus"
    weight = 1.0
    """In a hybrid, unless weights are given."""
    filter_fields: tuple[str, ...] = ()
    fields: Any = None
    filtered: Callable[[Filter], Retriever]
    """Both set by `filtered.attach` where an index keeps fields: a `fields.Fields`."""

    def rank(self, queries: Sequence[str], k: int, allowed: "Mask | None" = None) -> Ranking:
        """Return scores and rows of at most `k` hits for each query, best first, ties by row.

        `allowed` (num_documents,): the rows that may be hits.
        """
        raise NotImplementedError

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return self.hits(self.rank(queries, k))

    def hits(self, ranking: Ranking) -> list[list[Hit]]:
        """Read the documents of a ranking."""
        scores, rows = ranking
        with stage("documents"):
            documents = iter(self.corpus.documents([row for ranked in rows for row in ranked]))
            return [[Hit(next(documents), score) for score in ranked] for ranked in scores]


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Add the duration of the `with` block to stage `name`; almost free outside of `collect`."""
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
    """Collect the stage times of everything that this thread calls in the `with` block."""
    seconds: Seconds = {}
    token = _collected.set(seconds)
    try:
        yield seconds
    finally:
        _collected.reset(token)
