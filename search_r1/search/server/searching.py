"""What happens to a batch in a search thread: the caches on disk, the engine, the record."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from typing import Any

from search_r1.search.backends.base import Retriever, fingerprint
from search_r1.search.errors import SearchError
from search_r1.search.recording import Record, Recorder
from search_r1.search.schema import Document, Hit, Written, written
from search_r1.search.timing import Seconds, collect, stage
from search_r1.storage import FileStore, Key

logger = logging.getLogger(__name__)

Result = Written | SearchError


@dataclass
class Outcome:
    """Results in the order of the queries, and where the time (s) went."""

    results: list[Result]
    seconds: Seconds = field(default_factory=dict)
    num_searched: int = 0
    """Queries that the engine answered."""
    elapsed: float = 0.0


class Searcher:
    """Runs batches of one k; called from at most `retriever.num_threads` threads at once."""

    def __init__(
        self, retriever: Retriever, disk: FileStore | None, recorder: Recorder | None
    ) -> None:
        """`disk` and `recorder` get the new results, written by a thread of their own."""
        self._retriever = retriever
        self._scope = (fingerprint(retriever.info()), retriever.name)
        self._disk = disk
        self._recorder = recorder
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write")

    def run(self, queries: Sequence[str], k: int) -> Outcome:
        """A result for every query; an error of one query does not reach the others."""
        start = time.perf_counter()
        with collect() as seconds:
            kept: dict[str, list[Hit]] = {}
            if self._disk is not None:
                with stage("cache_file"):
                    kept = self._look_up(self._disk, queries, k)
            missing = [query for query in queries if query not in kept]
            results: dict[str, Result] = {query: written(hits) for query, hits in kept.items()}
            if missing:
                results |= zip(missing, self._search(missing, k), strict=True)
        elapsed = time.perf_counter() - start
        return Outcome([results[query] for query in queries], seconds, len(missing), elapsed)

    def close(self) -> None:
        """Finish what is to be written, and close the files."""
        self._writer.shutdown(wait=True)
        for file in (self._disk, self._recorder):
            if file is not None:
                file.close()

    def _search(self, queries: list[str], k: int) -> list[Result]:
        """One search; where it fails with several queries, one search for each."""
        start = time.perf_counter()
        try:
            found = self._retriever.search(queries, k)
        except Exception as error:
            if len(queries) > 1:
                return [result for query in queries for result in self._search([query], k)]
            if isinstance(error, SearchError):
                return [error]
            logger.error("the engine failed unexpectedly", exc_info=error)
            return [SearchError(f"the engine failed: {type(error).__name__}: {error}")]
        if len(found) != len(queries):
            return [SearchError(f"{len(found)} results for {len(queries)} queries")] * len(queries)
        if self._disk is not None or self._recorder is not None:
            seconds = time.perf_counter() - start
            self._writer.submit(self._keep, queries, k, found, seconds).add_done_callback(_report)
        return list(map(written, found))

    def _keep(self, queries: list[str], k: int, found: list[list[Hit]], seconds: float) -> None:
        if self._recorder is not None:
            pairs = zip(queries, found, strict=True)
            self._recorder.write([Record(query, k, hits, seconds) for query, hits in pairs])
        if self._disk is not None:
            pairs = zip(queries, found, strict=True)
            self._disk.put({self._key(query, k): _to_json(hits) for query, hits in pairs})

    def _look_up(self, disk: FileStore, queries: Sequence[str], k: int) -> dict[str, list[Hit]]:
        keys = {self._key(query, k): query for query in queries}
        return {keys[key]: _from_json(hits) for key, hits in disk.get(list(keys)).items()}

    def _key(self, query: str, k: int) -> Key:
        return (*self._scope, k, query)


def _to_json(hits: Sequence[Hit]) -> list[list[str | float]]:
    return [[*astuple(hit.document), hit.score] for hit in hits]


def _from_json(rows: Sequence[Sequence[Any]]) -> list[Hit]:
    return [Hit(Document(*fields), score) for *fields, score in rows]


def _report(written: "Future[None]") -> None:
    """Say that a record or a cache file was not written; answers are not affected."""
    error = None if written.cancelled() else written.exception()
    if error is not None:
        logger.error("results were not written: %s: %s", type(error).__name__, error)
