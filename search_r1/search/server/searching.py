"""What happens to a batch in a search thread: the caches on disk, the engine, the record."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from search_r1.search.backends.base import Retriever
from search_r1.search.errors import SearchError
from search_r1.search.recording import Record, Recorder
from search_r1.search.schema import Hit
from search_r1.search.server.disk_cache import DiskCache
from search_r1.search.stages import Seconds, collect, stage

logger = logging.getLogger(__name__)

Result = list[Hit] | SearchError


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
        self, retriever: Retriever, disk: DiskCache | None, recorder: Recorder | None
    ) -> None:
        """`disk` and `recorder` get the new results, written by a thread of their own."""
        self._retriever = retriever
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
                    kept = self._disk.get(queries, k)
            missing = [query for query in queries if query not in kept]
            results: dict[str, Result] = {**kept}
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
        except SearchError as error:
            if len(queries) == 1:
                return [error]
            return [result for query in queries for result in self._search([query], k)]
        if len(found) != len(queries):
            return [SearchError(f"{len(found)} results for {len(queries)} queries")] * len(queries)
        if self._disk is not None or self._recorder is not None:
            seconds = time.perf_counter() - start
            self._writer.submit(self._keep, queries, k, found, seconds).add_done_callback(_report)
        return list(found)

    def _keep(self, queries: list[str], k: int, found: list[list[Hit]], seconds: float) -> None:
        if self._recorder is not None:
            pairs = zip(queries, found, strict=True)
            self._recorder.write([Record(query, k, hits, seconds) for query, hits in pairs])
        if self._disk is not None:
            self._disk.put(dict(zip(queries, found, strict=True)), k)


def _report(written: "Future[None]") -> None:
    """Say that a record or a cache file was not written; answers are not affected."""
    error = None if written.cancelled() else written.exception()
    if error is not None:
        logger.error("results were not written: %s: %s", type(error).__name__, error)
