"""The settings of a benchmark and the one way in which it measures a server."""

import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.retrieval.corpora import Place
from benchmarks.retrieval.figures import Figure
from benchmarks.retrieval.load import LoadReport, run_load
from benchmarks.retrieval.profiling import recorded
from benchmarks.retrieval.servers import serving

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
    engines: tuple[str, ...] = ("faiss", "faiss@bfloat16", "torch")
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
    resident: tuple[int, int]
    """Bytes of the server's resident set after the load, and those that are no mapped file."""
    counters: dict[str, float]
    """What the server's `/metrics` gained during the load."""


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
        before, cpu = server.counters(), server.cpu_seconds()
        with recorded(server.pid, profile) if profile else contextlib.nullcontext():
            clients = 1 if batch > 1 else bench.clients
            report = run_load(
                server.url, queries, clients=clients, mode=mode, topk=bench.topk, batch=batch
            )
        used = server.cpu_seconds() - cpu
        gained = {k: v - before.get(k, 0.0) for k, v in server.counters().items()}
        run = Run(report, used, server.resident_bytes(), gained)
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


STAGE = re.compile(r'retriever_stage_seconds_sum\{stage="(\w+)"\}')


def cost_figures(name: str, runs: Sequence[Run]) -> list[Figure]:
    """Processor time, size of batches and time by stage of a server, the mean over its runs."""
    queries = sum(run.report.num_queries for run in runs)
    used = sum(run.server_cpu for run in runs)
    figures = [Figure(f"{name}: processor time", 1e3 * used / queries, "ms/query")]
    gained: Counter[str] = Counter()
    for run in runs:
        gained.update(run.counters)
    if count := gained["retriever_batch_size_count"]:
        size = gained["retriever_batch_size_sum"] / count
        figures.append(Figure(f"{name}: batch", size, "queries"))
    for key, seconds in sorted(gained.items()):
        if (match := STAGE.fullmatch(key)) and match[1] != "queue":
            figures.append(Figure(f"{name}: stage {match[1]}", 1e3 * seconds / queries, "ms/query"))
    return figures
