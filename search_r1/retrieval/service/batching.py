"""Merges the queries of all requests into batches, in which each distinct query is searched once.

Everything here runs on the event loop, except the searches, which run in threads. An idle backend
waits for more queries before it searches: a few milliseconds, or a small fraction of the last
search's duration, in which the clients that were just answered send their next queries. Without
this wait, the clients split into two halves that take turns, with batches of half the size. Queries
that arrive while a backend is busy form the next batch. A batch has one k, since a backend may rank
documents differently for k and 2k, and one filter.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import itemgetter
from sys import getsizeof
from typing import TypeVar

from cachetools import LRUCache

from search_r1.retrieval.engines.base import Filter, Retriever, Seconds, collect
from search_r1.retrieval.errors import Overloaded, SearchError, UpstreamUnavailable
from search_r1.retrieval.service.answers import SerializedHits, serialize_hits
from search_r1.retrieval.service.metrics import Metrics
from search_r1.retrieval.settings import ServiceConfig

logger = logging.getLogger(__name__)

LINGER_FRACTION, MAX_LINGER_S = 1 / 16, 0.05
"""Fraction of the last search's duration that a backend waits for more queries, and its limit."""
ENTRY_OVERHEAD_BYTES = 500
"""Memory of a cached result without its query and hits."""
SMOOTHING = 0.2
"""Weight of the last batch in the moving average of the query rate."""
MAX_RETRY_AFTER_S = 60.0

T = TypeVar("T")
QueryResult = SerializedHits | SearchError
Scope = tuple[int, Filter]
"""k, and what the hits are limited to."""


@dataclass(eq=False)
class BatchResult:
    """The results of one batch in the order of its queries, and where the time was spent."""

    results: list[QueryResult]
    start: float = field(default_factory=time.perf_counter)
    seconds: Seconds = field(default_factory=dict)
    elapsed: float = 0.0
    """Seconds of the whole batch."""


@dataclass(eq=False)
class Job:
    """A distinct query in a scope, waiting or being searched, and the requests that need it."""

    query: str
    scope: Scope
    requests: "set[PendingRequest]" = field(default_factory=set)
    is_started: bool = False


@dataclass(eq=False)
class PendingRequest:
    """A request that waits for results; `done` completes with the last one, or with an error."""

    done: asyncio.Future[None]
    results: dict[str, SerializedHits] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    """Jobs of the queries that have no result yet."""
    batches: set[BatchResult] = field(default_factory=set)
    """The batches that the results came from."""
    start: float = field(default_factory=time.perf_counter)

    def add_result(self, job: Job, result: SerializedHits, batch: BatchResult) -> None:
        self.results[job.query] = result
        self.batches.add(batch)
        del self.jobs[job.query]
        if not self.jobs and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def stage_seconds(self) -> Seconds:
        """Return the seconds of each stage summed over the batches; `queue` is the longest wait."""
        total: Seconds = {}
        for batch in self.batches:
            total["queue"] = max(batch.start - self.start, total.get("queue", 0.0))
            for name, seconds in batch.seconds.items():
                total[name] = total.get(name, 0.0) + seconds
        return total


def search_batch(retriever: Retriever, queries: list[str], k: int) -> BatchResult:
    """Return a result for every query; an error affects only the query that caused it."""
    start = time.perf_counter()
    with collect() as seconds:
        results = _search(retriever, queries, k)
    return BatchResult(results, start, seconds, time.perf_counter() - start)


def _search(retriever: Retriever, queries: list[str], k: int) -> list[QueryResult]:
    """Search for several queries at once; if that fails, search for each of them."""
    try:
        results = retriever.search(queries, k)
    except Exception as error:  # backends raise any; in this thread it is handed to the queries
        if len(queries) > 1:
            return _search_individually(retriever, queries, k)
        if isinstance(error, SearchError):
            return [error]
        logger.error("the backend failed unexpectedly", exc_info=error)
        return [_to_search_error(error)]
    if len(results) != len(queries):
        mismatch = f"{len(results)} results for {len(queries)} queries"
        return [SearchError(mismatch)] * len(queries)
    return list(map(serialize_hits, results))


def _search_individually(retriever: Retriever, queries: list[str], k: int) -> list[QueryResult]:
    """Search for each query, until an online service is unavailable for two in a row.

    The other queries get the same error, since each of them would wait for all retries.
    """
    results: list[QueryResult] = []
    for query in queries:
        last = results[-2:]
        if len(last) == 2 and all(isinstance(r, UpstreamUnavailable) for r in last):
            results.append(last[-1])
        else:
            results += _search(retriever, [query], k)
    return results


def _to_search_error(error: BaseException) -> SearchError:
    return SearchError(f"the backend failed: {type(error).__name__}: {error}")


class Batcher:
    """Answers requests from the cache, from searches in progress, or from new batches."""

    def __init__(self, retriever: Retriever, config: ServiceConfig, metrics: Metrics) -> None:
        self._retriever = retriever
        self._config = config
        self._metrics = metrics
        # Each entry counts as at least this many bytes; so `cache_bytes` also limits the number.
        self._min_entry_bytes = config.cache_bytes // max(1, config.cache_entries)
        self._cache: LRUCache[tuple[str, Scope], tuple[int, SerializedHits]] = LRUCache(
            config.cache_bytes if config.cache_entries else 0, getsizeof=itemgetter(0)
        )
        self._num_threads = self._num_free = retriever.num_threads
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="search")
        self._jobs: dict[tuple[str, Scope], Job] = {}
        """All jobs, waiting or being searched, by query and scope."""
        self._waiting: dict[Scope, dict[str, Job]] = {}
        """Waiting jobs by scope and query; the first scope is searched next."""
        self._timer: asyncio.TimerHandle | None = None
        self._linger_s = self._rate = 0.0
        metrics.watch(lambda: self.num_waiting, lambda: self.num_pending)

    @property
    def num_pending(self) -> int:
        return len(self._jobs)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def submit(self, queries: Sequence[str], k: int, filter: Filter = ()) -> PendingRequest:
        """Request results, which must be released later; raises Overloaded if the queue is full."""
        scope = k, filter
        request = PendingRequest(asyncio.get_running_loop().create_future())
        distinct = dict.fromkeys(queries)
        for query in distinct:
            if (cached := self._cache.get((query, scope))) is not None:
                request.results[query] = cached[1]
        missing = [query for query in distinct if query not in request.results]
        new = [query for query in missing if (query, scope) not in self._jobs]
        self._check_capacity(len(new))
        num_joined = len(queries) - len(request.results) - len(new)
        self._metrics.count_queries(len(request.results), num_joined, len(new))
        for query in new:
            job = self._jobs[query, scope] = Job(query, scope)
            self._waiting.setdefault(scope, {})[query] = job
        for query in missing:
            job = request.jobs[query] = self._jobs[query, scope]
            job.requests.add(request)
        if new:
            self._schedule_search(max(self._config.batch_wait_ms / 1000, self._linger_s))
        return request

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread of the searches, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def release(self, request: PendingRequest) -> None:
        """Stop waiting for a request's missing results; drop queries that no other one needs."""
        for job in request.jobs.values():
            job.requests.discard(request)
            if not job.requests and not job.is_started:
                del self._jobs[job.query, job.scope], self._waiting[job.scope][job.query]
                if not self._waiting[job.scope]:
                    del self._waiting[job.scope]
                self._metrics.dropped.inc()
        request.jobs.clear()

    def fail_all(self, error: SearchError) -> None:
        """Complete every pending request with an error."""
        for request in {request for job in self._jobs.values() for request in job.requests}:
            request.fail(error)

    def shut_down(self) -> bool:
        """Stop the threads; return whether no search is still running."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        return self._num_free == self._num_threads

    def _check_capacity(self, num_new: int) -> None:
        """Raise Overloaded if the queue is full, with the time to answer the excess queries."""
        excess = self.num_pending + num_new - self._config.max_pending
        if num_new and excess > 0:
            seconds = excess / self._rate if self._rate else 1.0
            raise Overloaded(
                f"{self.num_pending} queries are waiting and {num_new} more were asked, "
                f"{self._config.max_pending} may wait: ask again later",
                min(MAX_RETRY_AFTER_S, max(1.0, seconds)),
            )

    def _schedule_search(self, wait: float) -> None:
        """Search in `wait` s, or at once if a batch is full. A busy thread continues by itself."""
        if not self._num_free or not self._waiting:
            return
        if self.num_waiting >= self._config.max_batch:
            self._start_batches()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait, self._start_batches)

    def _start_batches(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        while self._num_free and self._waiting:
            jobs = self._next_batch()
            self._num_free -= 1
            queries = [job.query for job in jobs]
            k, filter = jobs[0].scope
            retriever = self._retriever
            if filter:  # only of backends that filter
                retriever = retriever.filtered(filter)  # type: ignore[attr-defined]
            search = partial(search_batch, retriever, queries, k)
            batch = loop.run_in_executor(self._threads, search)
            batch.add_done_callback(partial(self._finish_batch, jobs))

    def _next_batch(self) -> list[Job]:
        """Take the next jobs of one scope, spread over the free threads; scopes take turns."""
        scope = next(iter(self._waiting))
        waiting = self._waiting.pop(scope)
        size = min(self._config.max_batch, -(-len(waiting) // self._num_free))
        jobs = list(islice(waiting.values(), size))
        for job in jobs:
            del waiting[job.query]
            job.is_started = True
        if waiting:
            self._waiting[scope] = waiting
        return jobs

    def _finish_batch(self, jobs: list[Job], future: "asyncio.Future[BatchResult]") -> None:
        """Hand out the results, then search for the queries that have arrived meanwhile."""
        self._num_free += 1
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            logger.error("the backend failed unexpectedly", exc_info=error)
            batch = BatchResult([_to_search_error(error)] * len(jobs))
        else:
            batch = future.result()
            self._update_estimates(len(jobs), batch)
        for job, result in zip(jobs, batch.results, strict=True):
            del self._jobs[job.query, job.scope]
            if isinstance(result, SearchError):
                for request in job.requests:
                    request.fail(result)
                continue
            with suppress(ValueError):  # larger than the whole cache
                size = max(self._min_entry_bytes, entry_bytes(job.query, result))
                self._cache[job.query, job.scope] = size, result
            for request in job.requests:
                request.add_result(job, result, batch)
        self._schedule_search(self._linger_s)

    def _update_estimates(self, num_queries: int, batch: BatchResult) -> None:
        """Update the query rate (1/s) and the time to linger after a batch."""
        self._metrics.observe(num_queries, batch.seconds)
        rate = self._num_threads * num_queries / max(batch.elapsed, 1e-6)
        self._rate += (SMOOTHING if self._rate else 1.0) * (rate - self._rate)
        self._linger_s = min(LINGER_FRACTION * batch.elapsed, MAX_LINGER_S)


def entry_bytes(query: str, hits: SerializedHits) -> int:
    """Estimate the memory of a cached result with its query."""
    return ENTRY_OVERHEAD_BYTES + getsizeof(query) + getsizeof(hits) + sum(map(getsizeof, hits))
