"""The settings of a benchmark and the one way in which it measures a server."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.corpora import Place
from benchmarks.figures import Figure
from benchmarks.load import LoadReport, run_load
from benchmarks.profiling import recorded
from benchmarks.servers import serving

NUM_WARM = 32


@dataclass(frozen=True)
class Bench:
    """What every part needs to know."""

    cache: Path
    model: str
    questions: list[str] = field(repr=False)
    """Distinct real questions."""
    threads: int
    """Of every server: all cores."""
    num_queries: int = 2000
    num_slow: int = 200
    """Queries for the baseline on 1 million passages, where it is slow."""
    rounds: int = 2
    """Runs of every server; the order turns around each time."""
    clients: int = 64
    topk: int = 3
    engines: tuple[str, ...] = ("faiss", "torch")
    profile: bool = False

    def place(self, name: str) -> Place:
        """The corpus called `44k` or `1m`."""
        return Place(self.cache, name)

    @property
    def asked(self) -> list[str]:
        """The queries whose answers are timed."""
        return self.questions[: self.num_queries]

    @property
    def warm(self) -> list[str]:
        """Queries of the warm-up: none of them is timed."""
        return [f"{question} (warm-up)" for question in self.questions[-NUM_WARM:]]


@dataclass(frozen=True)
class Run:
    """One load on one freshly started server."""

    report: LoadReport
    server_cpu: float
    """Processor seconds of the server during the load."""
    start_seconds: float
    resident: tuple[int, int]
    """Bytes of the server's resident set after the load, and those that are no mapped file."""


def measure(
    bench: Bench,
    name: str,
    place: Place,
    queries: Sequence[str],
    *,
    mode: str = "raw",
    batch: int = 1,
    extra: Sequence[str] = (),
    profile: Path | None = None,
) -> Run:
    """Start the server, warm it up, load it; raises RuntimeError for any incomplete answer."""
    with serving(name, place, bench.model, bench.threads, *extra) as server:
        run_load(server.url, bench.warm, clients=8, topk=bench.topk)
        cpu = server.cpu_seconds()
        with recorded(server.pid, profile) if profile else contextlib.nullcontext():
            clients = 1 if batch > 1 else bench.clients
            report = run_load(
                server.url, queries, clients=clients, mode=mode, topk=bench.topk, batch=batch
            )
        used = server.cpu_seconds() - cpu
        run = Run(report, used, server.start_seconds, server.resident_bytes())
    if report.num_errors:
        raise RuntimeError(
            f"{name} on {place.name}: {report.num_errors} of {len(queries)} answers are not "
            f"complete, expected none; the first: {report.first_error}"
        )
    return run


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def rate_figures(name: str, runs: Sequence[Run], *, note: str = "") -> list[Figure]:
    """Queries per second and latencies of a server, the mean over its runs."""
    reports = [run.report for run in runs]
    percents = [
        Figure(f"{name}: p{p}", 1e3 * mean([r.latency(p) for r in reports]), "ms", note=note)
        for p in (50, 99)
    ]
    return [
        Figure(f"{name}: rate", mean([r.rate for r in reports]), "queries/s", note=note),
        *percents,
    ]
