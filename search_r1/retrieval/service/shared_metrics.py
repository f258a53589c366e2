"""Metrics of several workers as one: each writes to files in a folder, any of them reads all."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from search_r1.retrieval.service.cut_counts import CUT, ENCODED
from search_r1.retrieval.service.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from search_r1.retrieval.encoders.cuts import Cuts

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client's own: set before it is imported, metrics are kept in files there."""
REFRESH_S = 1.0


class SharedMetrics(Metrics):
    """Metrics that are summed over all workers; what is read from objects is a second old."""

    def __init__(self) -> None:
        super().__init__()
        self._gauges: list[tuple[Gauge, Callable[[], int]]] = []
        self._cuts: Sequence[Cuts] = ()
        self._num_seen: dict[tuple[int, str], int] = {}
        self._cut_counters = [
            Counter(name, text, ["kind"], registry=self._registry) for name, text in (ENCODED, CUT)
        ]

    def watch_cuts(self, cuts: "Sequence[Cuts]") -> None:
        self._cuts = cuts

    def text(self) -> bytes:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def refresh_forever(self) -> None:
        """Write what is read from objects, once a second, until the process ends."""
        while True:
            self.refresh()
            time.sleep(REFRESH_S)

    def refresh(self) -> None:
        for gauge, read in self._gauges:
            gauge.set(read())
        for counts in self._cuts:
            numbers = (counts.num_texts, counts.num_cut)
            for i, (counter, number) in enumerate(zip(self._cut_counters, numbers, strict=True)):
                counter.labels(counts.what).inc(number - self._num_seen.get((i, counts.what), 0))
                self._num_seen[i, counts.what] = number

    def _add_gauge(self, name: str, text: str, read: Callable[[], int]) -> None:
        gauge = Gauge(name, text, registry=self._registry, multiprocess_mode="livesum")
        self._gauges.append((gauge, read))


def forget(pid: int | None) -> None:
    """Take the gauges of a worker that ended out of the metrics; its counts stay."""
    mark_process_dead(pid)  # type: ignore[no-untyped-call]
