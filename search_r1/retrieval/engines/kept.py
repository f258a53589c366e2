"""Keeps a backend's results in a sqlite file: found again after a restart, replayed without it.

A result's key is the backend, `k` and the query; the value has the hits and the search time. The
backend itself, which is the fingerprint of its facts and its name, is the key of these facts.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

from search_r1.retrieval.engines.base import Filter, Retriever, stage
from search_r1.retrieval.schema import Document, Hit, fingerprint
from search_r1.store import FileStore, Key


class KeepingRetriever:
    """Searches the file, then the backend for what is missing; otherwise as the backend."""

    def __init__(
        self, retriever: Retriever, store: FileStore, count_found: Callable[[int], object]
    ) -> None:
        """`count_found` is called with the number of queries of a search that the file answers."""
        self._retriever, self._store, self._count_found = retriever, store, count_found
        self.name = retriever.name
        self.num_threads, self.num_documents = retriever.num_threads, retriever.num_documents
        self.info = retriever.info
        self.filter_fields = getattr(retriever, "filter_fields", ())
        facts = retriever.info()
        self._backend = (fingerprint(facts), retriever.name)
        store.put({self._backend: facts})

    def filtered(self, filter: Filter) -> Retriever:
        """Return the backend's own: the file keeps searches of all passages."""
        narrowed: Retriever = self._retriever.filtered(filter)  # type: ignore[attr-defined]
        return narrowed

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        with stage("cache_file"):
            found = self._store.get([(*self._backend, k, query) for query in queries])
        hits = {str(query): read_value(value)[0] for (*_, query), value in found.items()}
        missing = [query for query in queries if query not in hits]
        if missing:
            start = time.perf_counter()
            results = self._retriever.search(missing, k)
            seconds = time.perf_counter() - start
            hits |= zip(missing, results, strict=True)
            self._store.put({
                (*self._backend, k, query): to_value(new, seconds)
                for query, new in zip(missing, results, strict=True)
            })  # fmt: skip
        self._count_found(len(queries) - len(missing))
        return [hits[query] for query in queries]


@contextlib.contextmanager
def open_kept(
    retriever: Retriever, path: str, count_found: Callable[[int], object]
) -> Iterator[KeepingRetriever]:
    """Open the file of --cache_path around a backend; raises StorageError."""
    with contextlib.closing(FileStore(path, "--cache_path")) as store:
        yield KeepingRetriever(retriever, store, count_found)


def result_keys(store: FileStore) -> list[Key]:
    """Return the keys of results; a file may also hold other entries."""
    return [key for key in store.list_keys() if len(key) == 4 and isinstance(key[2], int)]


def to_value(hits: Sequence[Hit], seconds: float) -> dict[str, Any]:
    """Return the value of a result."""
    return {"hits": [[*astuple(hit.document), hit.score] for hit in hits], "seconds": seconds}


def read_value(value: Any) -> tuple[list[Hit], float]:
    """Return the hits and the seconds of a value; files of earlier versions have no seconds."""
    rows, seconds = (value, 0.0) if isinstance(value, list) else (value["hits"], value["seconds"])
    return [Hit(Document(*row[:-1]), row[-1]) for row in rows], seconds
