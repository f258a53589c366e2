"""Merges the queries of all requests into batches of one k, each distinct query searched once.

Everything here runs on the event loop; searches run in threads. An engine waits a moment for more
queries before it searches: a few milliseconds, or a small share of what the last search took, in
which the clients it answered come back. Without that share they split into two halves that take
turns, and batches stay half as large. While an engine is busy, whatever arrives is the next batch.
Batches hold one k, since engines may rank k and 2k documents differently.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import islice
from operator import itemgetter
from sys import getsizeof

from cachetools import LRUCache

from search_r1.search.backends.base import Retriever, Seconds, collect, fingerprint, stage
from search_r1.search.errors import Overloaded, SearchError, SetupError, UpstreamUnavailable
from search_r1.search.recording import Record, Recorder
from search_r1.search.schema import Document, Hit, SerializedHits, serialize_hits
from search_r1.search.server.metrics import Metrics
from search_r1.search.settings import ServiceConfig
from search_r1.storage import FileStore, Key, StorageError

logger = logging.getLogger(__name__)

LINGER = 1 / 16
"""Share of the last search that an engine waits for more queries ..."""
MAX_LINGER = 0.05
"""... and at most so long, in s."""
ENTRY_BYTES = 500
"""Memory of a cached result beside its query and hits."""
SMOOTHING = 0.2
"""Weight of the last batch in the measured rate."""
LONGEST_RETRY_S = 60.0


Result = SerializedHits | SearchError


@dataclass(eq=False)
class Outcome:
    """A search of several queries: results in their order, and where the time (s) went."""

    results: list[Result]
    start: float = field(default_factory=time.perf_counter)
    seconds: Seconds = field(default_factory=dict)
    num_searched: int = 0
    """Queries that the engine answered."""
    elapsed: float = 0.0


@dataclass(eq=False)
class Job:
    """A distinct query at one k, waiting or being searched, and the requests that want it."""

    query: str
    k: int
    claims: "set[Claim]" = field(default_factory=set)
    is_searched: bool = False


@dataclass(eq=False)
class Claim:
    """A request's claim on the results of its queries; `done` ends with all, or an error."""

    done: asyncio.Future[None]
    found: dict[str, SerializedHits] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    """Queries without a result yet."""
    batches: set[Outcome] = field(default_factory=set)
    """Searches that answered it."""
    start: float = field(default_factory=time.perf_counter)

    def take(self, job: Job, result: SerializedHits, batch: Outcome) -> None:
        """One result."""
        self.found[job.query] = result
        self.batches.add(batch)
        del self.jobs[job.query]
        if not self.jobs and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        """End the waiting with an error."""
        if not self.done.done():
            self.done.set_exception(error)

    def stages(self) -> Seconds:
        """Seconds by stage, summed over the searches; `queue` is the longest wait."""
        total: Seconds = {}
        for batch in self.batches:
            total["queue"] = max(batch.start - self.start, total.get("queue", 0.0))
            for name, seconds in batch.seconds.items():
                total[name] = total.get(name, 0.0) + seconds
        return total


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
                    rows = self._disk.get([self._key(query, k) for query in queries])
                    for (*_, query), hits in rows.items():
                        kept[str(query)] = [Hit(Document(*row[:-1]), row[-1]) for row in hits]
            missing = [query for query in queries if query not in kept]
            results: dict[str, Result] = {
                query: serialize_hits(hits) for query, hits in kept.items()
            }
            if missing:
                results |= zip(missing, self._search(missing, k), strict=True)
        elapsed = time.perf_counter() - start
        found = [results[query] for query in queries]
        return Outcome(found, start, seconds, len(missing), elapsed)

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
                return self._search_apart(queries, k)
            if isinstance(error, SearchError):
                return [error]
            logger.error("the engine failed unexpectedly", exc_info=error)
            return [SearchError(f"the engine failed: {type(error).__name__}: {error}")]
        if len(found) != len(queries):
            return [SearchError(f"{len(found)} results for {len(queries)} queries")] * len(queries)
        if self._disk is not None or self._recorder is not None:
            seconds = time.perf_counter() - start
            self._writer.submit(self._keep, queries, k, found, seconds).add_done_callback(_report)
        return list(map(serialize_hits, found))

    def _search_apart(self, queries: list[str], k: int) -> list[Result]:
        """One search for each query, until two in a row find that a service is away: each takes as
        long as all its retries."""
        results: list[Result] = []
        for query in queries:
            last = results[-2:]
            if len(last) == 2 and all(isinstance(one, UpstreamUnavailable) for one in last):
                results.append(last[-1])
            else:
                results += self._search([query], k)
        return results

    def _keep(self, queries: list[str], k: int, found: list[list[Hit]], seconds: float) -> None:
        if self._recorder is not None:
            pairs = zip(queries, found, strict=True)
            self._recorder.write([Record(query, k, hits, seconds) for query, hits in pairs])
        if self._disk is not None:
            rows = [[[*astuple(hit.document), hit.score] for hit in hits] for hits in found]
            keys = [self._key(query, k) for query in queries]
            self._disk.put(dict(zip(keys, rows, strict=True)))

    def _key(self, query: str, k: int) -> Key:
        return (*self._scope, k, query)


def open_store(path: str, option: str) -> FileStore:
    """The file that an option names; raises SetupError for one that cannot be a store."""
    try:
        return FileStore(path, option)
    except StorageError as error:
        raise SetupError(str(error)) from error


def _report(written: "Future[None]") -> None:
    """Say that a record or a cache file was not written; answers are not affected."""
    error = None if written.cancelled() else written.exception()
    if error is not None:
        logger.error("results were not written: %s: %s", type(error).__name__, error)


class Batcher:
    """Answers claims from the cache, from searches under way, or from new batches."""

    def __init__(
        self, searcher: Searcher, num_threads: int, config: ServiceConfig, metrics: Metrics
    ) -> None:
        """`num_threads` searches at once."""
        self._searcher = searcher
        self._config = config
        self._metrics = metrics
        # An entry counts as its share of the bytes at least: one number holds both limits.
        self._share = config.cache_bytes // max(1, config.cache_entries)
        self._cache: LRUCache[tuple[str, int], tuple[int, SerializedHits]] = LRUCache(
            config.cache_bytes if config.cache_entries else 0, getsizeof=itemgetter(0)
        )
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="search")
        self._num_threads = self._num_free = num_threads
        self._in_flight: dict[tuple[str, int], Job] = {}
        self._waiting: dict[int, dict[str, Job]] = {}
        """By k; the k at the front is searched next."""
        self._timer: asyncio.TimerHandle | None = None
        self._linger = self._rate = 0.0
        metrics.watch(lambda: self.num_waiting, lambda: self.num_pending)

    @property
    def num_pending(self) -> int:
        """Distinct queries that wait or are being searched."""
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Distinct queries that wait."""
        return sum(map(len, self._waiting.values()))

    def open(self, queries: Sequence[str], k: int) -> Claim:
        """Claim results; raises Overloaded if there is no room. A claim must be closed."""
        claim = Claim(asyncio.get_running_loop().create_future())
        distinct = dict.fromkeys(queries)
        for query in distinct:
            if (kept := self._cache.get((query, k))) is not None:
                claim.found[query] = kept[1]
        missing = [query for query in distinct if query not in claim.found]
        new = [query for query in missing if (query, k) not in self._in_flight]
        self._admit(len(new))
        num_joined = len(queries) - len(claim.found) - len(new)
        self._metrics.count_queries(len(claim.found), num_joined, len(new))
        for query in new:
            job = self._in_flight[query, k] = Job(query, k)
            self._waiting.setdefault(k, {})[query] = job
        for query in missing:
            job = claim.jobs[query] = self._in_flight[query, k]
            job.claims.add(claim)
        if new:
            self._wake(max(self._config.batch_wait_ms / 1000, self._linger))
        return claim

    def close(self, claim: Claim) -> None:
        """Give up what the claim still waits for; queries nobody else wants are not searched."""
        for job in claim.jobs.values():
            job.claims.discard(claim)
            if not job.claims and not job.is_searched:
                del self._in_flight[job.query, job.k], self._waiting[job.k][job.query]
                if not self._waiting[job.k]:
                    del self._waiting[job.k]
                self._metrics.dropped.inc()
        claim.jobs.clear()

    def fail_all(self, error: SearchError) -> None:
        """End the waiting of every claim."""
        for claim in {claim for job in self._in_flight.values() for claim in job.claims}:
            claim.fail(error)

    def shut_down(self) -> bool:
        """Let go of the threads; whether none of them is still searching."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        return self._num_free == self._num_threads

    def _admit(self, num_new: int) -> None:
        """Raise Overloaded, with the time that the measured rate needs for what is too much."""
        excess = self.num_pending + num_new - self._config.max_pending
        if num_new and excess > 0:
            seconds = excess / self._rate if self._rate else 1.0
            raise Overloaded(
                f"{self.num_pending} queries are waiting and {num_new} more were asked, "
                f"{self._config.max_pending} may wait: ask again later",
                min(LONGEST_RETRY_S, max(1.0, seconds)),
            )

    def _wake(self, wait: float) -> None:
        """Search in `wait` s, or at once if a batch is full; a busy engine looks by itself."""
        if not self._num_free or not self._waiting:
            return
        if self.num_waiting >= self._config.max_batch:
            self._search()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(wait, self._search)

    def _search(self) -> None:
        """Start a batch in every free thread while queries wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        while self._num_free and self._waiting:
            jobs = self._take()
            self._num_free -= 1
            queries = [job.query for job in jobs]
            searched = loop.run_in_executor(self._threads, self._searcher.run, queries, jobs[0].k)
            searched.add_done_callback(partial(self._finish, jobs))

    def _take(self) -> list[Job]:
        """The next jobs of one k, spread over the free threads; the other k's have their turns."""
        k = next(iter(self._waiting))
        of_k = self._waiting.pop(k)
        size = min(self._config.max_batch, -(-len(of_k) // self._num_free))
        jobs = list(islice(of_k.values(), size))
        for job in jobs:
            del of_k[job.query]
            job.is_searched = True
        if of_k:
            self._waiting[k] = of_k
        return jobs

    def _finish(self, jobs: list[Job], searched: "asyncio.Future[Outcome]") -> None:
        """Hand out the results, then search what has accumulated."""
        self._num_free += 1
        if searched.cancelled():
            return
        error = searched.exception()
        if error is not None:
            logger.error("the engine failed unexpectedly", exc_info=error)
            failure = SearchError(f"the engine failed: {type(error).__name__}: {error}")
            outcome = Outcome([failure] * len(jobs))
        else:
            outcome = searched.result()
            self._learn(len(jobs), outcome)
        for job, result in zip(jobs, outcome.results, strict=True):
            del self._in_flight[job.query, job.k]
            if isinstance(result, SearchError):
                for claim in job.claims:
                    claim.fail(result)
                continue
            with suppress(ValueError):  # larger than the whole cache
                size = max(self._share, num_bytes(job.query, result))
                self._cache[job.query, job.k] = size, result
            for claim in job.claims:
                claim.take(job, result, outcome)
        self._wake(self._linger)

    def _learn(self, num_queries: int, outcome: Outcome) -> None:
        """What a search tells of the next ones: the rate (queries/s), and how long to linger."""
        self._metrics.observe(num_queries, outcome.num_searched, outcome.seconds)
        rate = self._num_threads * num_queries / max(outcome.elapsed, 1e-6)
        self._rate += (SMOOTHING if self._rate else 1.0) * (rate - self._rate)
        self._linger = min(LINGER * outcome.elapsed, MAX_LINGER)


def num_bytes(query: str, hits: SerializedHits) -> int:
    """About the memory of a result and its query."""
    return ENTRY_BYTES + getsizeof(query) + getsizeof(hits) + sum(map(getsizeof, hits))
