"""Wall-clock seconds of a step's phases, measured on the driver, and the ranks' peak memory."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from verl.machine import GB
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.training.devices import PeakMemory

RANK_PHASES = (
    "old_log_prob", "values", "update_critic", "update_actor", "guard", "update_weights",
)  # fmt: skip
"""Phases of a step after which the ranks report their peak memory."""
CRITIC_PHASES = {"values": "critic.values", "update_critic": "critic.updates"}
"""Phases in which the critic computes, and the method called on its ranks."""


class Timings:
    """Wall-clock seconds of the named phases of one step, and the ranks' peak memory per phase.

    The seconds of a phase entered twice add up, and include those of its parts, `PHASE/PART`.
    """

    def __init__(self, take_peak: Callable[[], PeakMemory | None] = lambda: None) -> None:
        """`take_peak` returns the peak since its last call; None on devices without own memory."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.concurrent: dict[str, float] = {}
        """Seconds of work beside the phases, which belongs to none of them; hooks add them."""
        self.peaks: dict[str, PeakMemory] = {}
        self.spans: list[tuple[str, float, float]] = []
        """Name, begin and end of each phase, in seconds since the epoch."""
        self._start = time.perf_counter()
        self._take_peak = take_peak
        self._take_peak()  # resets the peak of earlier steps

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body under `name`; after a phase of the ranks, record their peak memory."""
        start, begin = time.perf_counter(), time.time()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start
            self.spans.append((name, begin, time.time()))
        if name in RANK_PHASES:
            self.record_peak(name, self._take_peak())

    def record_peak(self, name: str, peak: PeakMemory | None) -> None:
        """Record the peak memory of a phase or of concurrent work."""
        if peak is not None:
            self.peaks[name] = peak

    @property
    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._start

    @property
    def phases_total(self) -> float:
        """Total seconds of all phases."""
        return sum(s for name, s in self.seconds.items() if "/" not in name)

    def metrics(self) -> Metrics:
        """Return `timing_s/NAME` and, on devices with memory, `perf/device_memory_gb/PHASE/...`."""
        seconds = {**self.seconds, "step": self.elapsed}
        metrics = {f"timing_s/{name}": s for name, s in seconds.items()}
        for name, peak in self.peaks.items():
            metrics[f"perf/device_memory_gb/{name}/allocated"] = peak.allocated / GB
            metrics[f"perf/device_memory_gb/{name}/reserved"] = peak.reserved / GB
        return metrics
