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
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from search_r1.search.errors import DeadlineExceeded, SearchError
from search_r1.search.schema import Hit
from search_r1.search.server.admission import Gate
from search_r1.search.server.cache import Key, ResultCache
from search_r1.search.server.config import ServiceConfig
from search_r1.search.server.metrics import Metrics
from search_r1.search.server.searching import Outcome, Searcher
from search_r1.search.stages import Seconds

logger = logging.getLogger(__name__)

LINGER = 1 / 16
"""Share of the last search that an engine waits for more queries ..."""
MAX_LINGER = 0.05
"""... and at most so long, in s."""


class Ticket:
    """A request's claim on the results of its queries."""

    def __init__(self, queries: Sequence[str], k: int) -> None:
        """Not yet waiting for anything."""
        self.k = k
        self.start = time.perf_counter()
        self.jobs: dict[str, Job] = {}
        """Queries without a result yet."""
        self.batches: dict[int, Batch] = {}
        """Searches that answered it."""
        self.timer: asyncio.TimerHandle | None = None
        self._queries = queries
        self._found: dict[str, Sequence[Hit]] = {}
        self._future: asyncio.Future[None] | None = None

    @property
    def hits(self) -> list[Sequence[Hit]]:
        """The results in the order of the queries, once all are here."""
        return [self._found[query] for query in self._queries]

    @property
    def stages(self) -> Seconds:
        """Seconds by stage, summed over the searches; `queue` is the longest wait."""
        total: Seconds = {}
        for batch in self.batches.values():
            queue = max(0.0, batch.start - self.start)
            total["queue"] = max(queue, total.get("queue", 0.0))
            for name, seconds in batch.seconds.items():
                total[name] = total.get(name, 0.0) + seconds
        return total

    def add(self, query: str, result: Sequence[Hit] | SearchError) -> None:
        """Take one result; an error ends the waiting."""
        self.jobs.pop(query, None)
        if isinstance(result, SearchError):
            self.fail(result)
            return
        self._found[query] = result
        if not self.jobs and self._future is not None and not self._future.done():
            self._future.set_result(None)

    def fail(self, error: Exception) -> None:
        """End the waiting with an error."""
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)

    async def wait(self) -> None:
        """Until every result is here; raises what `fail` was given."""
        if not self.jobs:
            return
        self._future = asyncio.get_running_loop().create_future()
        try:
            await self._future
        finally:
            if self._future.done() and not self._future.cancelled():
                self._future.exception()  # else an error that nobody reads is logged


@dataclass
class Batch:
    """Queries that are searched together."""

    jobs: "list[Job]"
    start: float
    seconds: Seconds = field(default_factory=dict)


@dataclass
class Job:
    """A distinct query at one k, waiting or being searched, and who wants it."""

    query: str
    k: int
    number: int
    tickets: dict[int, Ticket] = field(default_factory=dict)
    is_searched: bool = False


class Batcher:
    """Answers tickets from the cache, from searches under way, or from new batches."""

    def __init__(
        self, searcher: Searcher, num_threads: int, config: ServiceConfig, metrics: Metrics
    ) -> None:
        """`num_threads` searches at once."""
        self._searcher = searcher
        self._config = config
        self._metrics = metrics
        self._gate = Gate(config.max_pending, num_threads)
        self._cache = ResultCache(config.cache_entries)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="search")
        self._num_free = num_threads
        self._in_flight: dict[Key, Job] = {}
        self._waiting: dict[int, dict[str, Job]] = {}
        self._num_waiting = 0
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._linger = 0.0
        metrics.watch(lambda: self._num_waiting, lambda: self.num_pending)

    @property
    def num_pending(self) -> int:
        """Distinct queries that wait or are being searched."""
        return len(self._in_flight)

    def open(self, queries: Sequence[str], k: int, seconds: float) -> Ticket:
        """Claim results within `seconds`; raises Overloaded if there is no room.

        A ticket must be closed.
        """
        ticket, new, num_hits = Ticket(queries, k), [], 0
        distinct = dict.fromkeys(queries)
        for query in distinct:
            found = self._cache.get((query, k))
            if found is not None:
                ticket.add(query, found)
                num_hits += 1
            elif (query, k) not in self._in_flight:
                new.append(query)
        self._gate.admit(len(new), self.num_pending)
        num_joined = len(distinct) - num_hits - len(new)
        self._metrics.count_queries(num_hits, num_joined, len(new), len(queries) - len(distinct))
        self._queue(new, k)
        self._join(ticket, distinct)
        if ticket.jobs:
            loop = asyncio.get_running_loop()
            ticket.timer = loop.call_later(seconds, self._expire, ticket, seconds)
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Give up what the ticket still waits for; queries nobody else wants are not searched."""
        if ticket.timer is not None:
            ticket.timer.cancel()
        for job in ticket.jobs.values():
            job.tickets.pop(id(ticket), None)
            if not job.tickets and not job.is_searched:
                del self._in_flight[job.query, job.k]
                self._forget(job)
                self._metrics.dropped.inc()
        ticket.jobs.clear()

    def fail_all(self, error: SearchError) -> None:
        """End the waiting of every ticket."""
        for job in list(self._in_flight.values()):
            for ticket in list(job.tickets.values()):
                ticket.fail(error)

    def shut_down(self) -> bool:
        """Let go of the threads; whether none of them is still searching."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        return self._num_free > 0 or not self._in_flight

    def _queue(self, queries: Iterable[str], k: int) -> None:
        for query in queries:
            self._number += 1
            job = Job(query, k, self._number)
            self._in_flight[query, k] = job
            self._waiting.setdefault(k, {})[query] = job
            self._num_waiting += 1
        self._wake()

    def _join(self, ticket: Ticket, queries: Iterable[str]) -> None:
        for query in queries:
            job = self._in_flight.get((query, ticket.k))
            if job is not None:
                job.tickets[id(ticket)] = ticket
                ticket.jobs[query] = job

    def _forget(self, job: Job) -> None:
        """Take a job out of the queue."""
        of_k = self._waiting[job.k]
        del of_k[job.query]
        self._num_waiting -= 1
        if not of_k:
            del self._waiting[job.k]

    def _expire(self, ticket: Ticket, seconds: float) -> None:
        ticket.fail(DeadlineExceeded(f"no answer within the {seconds:g} s that were allowed"))

    def _wake(self) -> None:
        """Search soon, or at once if a batch is full; a busy engine looks by itself later."""
        if not self._num_free or not self._waiting:
            return
        if self._num_waiting >= self._config.max_batch:
            self._search()
        elif self._timer is None:
            wait = max(self._config.batch_wait_ms / 1000, self._linger)
            self._timer = asyncio.get_running_loop().call_later(wait, self._search)

    def _search(self) -> None:
        """Start a batch in every free thread while queries wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        while self._num_free and self._waiting:
            batch = Batch(self._take(), time.perf_counter())
            self._num_free -= 1
            queries = [job.query for job in batch.jobs]
            searched = loop.run_in_executor(
                self._threads, self._searcher.run, queries, batch.jobs[0].k
            )
            searched.add_done_callback(partial(self._finish, batch))

    def _take(self) -> list[Job]:
        """The next jobs of the k that waits longest, spread over the free threads."""
        k = min(self._waiting, key=lambda k: next(iter(self._waiting[k].values())).number)
        of_k = self._waiting[k]
        size = min(self._config.max_batch, -(-len(of_k) // self._num_free))
        jobs = [job for job, _ in zip(of_k.values(), range(size), strict=False)]
        for job in jobs:
            self._forget(job)
            job.is_searched = True
        return jobs

    def _finish(self, batch: Batch, searched: "asyncio.Future[Outcome]") -> None:
        """Hand out the results, then search what has accumulated."""
        self._num_free += 1
        if searched.cancelled():
            return
        error = searched.exception()
        if error is not None:
            logger.error("the engine failed unexpectedly", exc_info=error)
            failure = SearchError(f"the engine failed: {type(error).__name__}: {error}")
            outcome = Outcome([failure] * len(batch.jobs))
        else:
            outcome = searched.result()
            self._metrics.observe(len(batch.jobs), outcome)
            self._gate.measured(len(batch.jobs), outcome.elapsed)
            self._linger = min(LINGER * outcome.elapsed, MAX_LINGER)
        batch.seconds = outcome.seconds
        for job, result in zip(batch.jobs, outcome.results, strict=True):
            del self._in_flight[job.query, job.k]
            if not isinstance(result, SearchError):
                self._cache.put((job.query, job.k), result)
            for ticket in job.tickets.values():
                ticket.batches[id(batch)] = batch
                ticket.add(job.query, result)
        self._linger_or_search()

    def _linger_or_search(self) -> None:
        """After a search: soon the next one, with those who come back; at once if it is full."""
        if not self._waiting or self._timer is not None:
            return
        if self._num_waiting >= self._config.max_batch or not self._linger:
            self._search()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._linger, self._search)
