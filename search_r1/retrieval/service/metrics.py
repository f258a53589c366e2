"""The Prometheus metrics of `/metrics`, in a separate registry for each app."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from search_r1.retrieval.engines.base import Seconds

if TYPE_CHECKING:  # of backends with an encoder only
    from search_r1.retrieval.encoders.cuts import Cuts

SECONDS = (5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of one service; their names begin with `retriever_`."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter("retriever_requests", "Requests to /retrieve by status", ["status"])
        self._queries = counter(
            "retriever_queries",
            "Queries by how they were answered: hit (memory), joined (a running search, or an "
            "equal query of the request), miss (queued)",
            ["cache"],
        )
        self.file_hits = counter("retriever_cache_file_hits", "Queries answered by the cache file")
        self.dropped = counter("retriever_dropped_queries", "Queries dropped before their search")
        self._batch = histogram("retriever_batch_size", "Queries per batch", buckets=BATCH_SIZES)
        self._stages = histogram(
            "retriever_stage_seconds", "Time of a batch by stage", ["stage"], buckets=SECONDS
        )
        self.latency = histogram(
            "retriever_request_seconds", "Time of an answered request", buckets=SECONDS
        )
        self.queue_wait = self._stages.labels("queue")

    def watch(self, waiting: Callable[[], int], pending: Callable[[], int]) -> None:
        """Set the functions that return the numbers of waiting and of pending queries."""
        self._add_gauge("retriever_queue_length", "Queries waiting", waiting)
        self._add_gauge("retriever_pending", "Queries waiting or in search", pending)

    def watch_cuts(self, cuts: "Sequence[Cuts]") -> None:
        """Show how many texts were encoded by models with an input limit, and how many were cut."""
        if cuts:
            from search_r1.retrieval.service.cut_counts import CutCollector  # noqa: PLC0415 encoders

            self._registry.register(CutCollector(cuts))

    def count_queries(self, hits: int, joined: int, misses: int) -> None:
        """Count the queries of a request; repetitions within it count as joined."""
        for how, count in (("hit", hits), ("joined", joined), ("miss", misses)):
            if count:
                self._queries.labels(how).inc(count)

    def observe(self, num_queries: int, stages: Seconds) -> None:
        """Count a batch of queries and observe the seconds of its stages."""
        self._batch.observe(num_queries)
        for stage, seconds in stages.items():
            self._stages.labels(stage).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _add_gauge(self, name: str, text: str, read: Callable[[], int]) -> None:
        Gauge(name, text, registry=self._registry).set_function(read)
