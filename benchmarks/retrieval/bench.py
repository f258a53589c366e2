"""The settings of a benchmark, and the measurement of one server under load."""

import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.retrieval.corpora import CorpusPaths
from benchmarks.retrieval.figures import Figure
from benchmarks.retrieval.load import LoadReport, run_load
from benchmarks.retrieval.profiling import record_profile
from benchmarks.retrieval.servers import run_server

NUM_WARM_UP = 32


@dataclass(frozen=True)
class Bench:
    """Settings of all parts."""

    cache: Path
    model: str
    questions: list[str] = field(repr=False)
    """Distinct real questions."""
    threads: int
    """Threads of each server."""
    num_queries: int = 2000
    num_slow: int = 200
    """Queries for the baseline on 1 million passages, where it is slow."""
    rounds: int = 2
    """Runs of each server; the order of the servers is reversed in every round."""
    clients: int = 64
    topk: int = 3
    engines: tuple[str, ...] = ("faiss", "faiss@bfloat16", "torch")
    profile: bool = False

    def paths(self, corpus: str) -> CorpusPaths:
        """Return the paths of the corpus `44k` or `1m`."""
        return CorpusPaths(self.cache, corpus)

    @property
    def queries(self) -> list[str]:
        """The timed queries."""
        return self.questions[: self.num_queries]

    def warm_up_queries(self, count: int = NUM_WARM_UP) -> list[str]:
        """Return the queries of a warm-up, none of which is timed."""
        return [f"{question} (warm-up)" for question in self.questions[-count:]]


@dataclass(frozen=True)
class Run:
    """Result of one load on one freshly started server."""

    report: LoadReport
    server_cpu: float
    """Processor seconds of the server during the load."""
    resident: tuple[int, int]
    """Bytes of the server's resident set after the load, in total and without mapped files."""
    counters: dict[str, float]
    """Increase of the server's counters in `/metrics` during the load."""


def measure(
    bench: Bench,
    name: str,
    paths: CorpusPaths,
    queries: Sequence[str],
    *,
    mode: str = "raw",
    batch: int = 1,
    extra: Sequence[str] = (),
    num_warm_up: int = NUM_WARM_UP,
    profile: Path | None = None,
) -> Run:
    """Start the server called `name`, warm it up and load it.

    `mode`: of the load generator, `raw` or `client`. `batch`: queries per request; with more than 1
    there is a single client. `extra`: further flags of our server. `profile`: file for the stacks
    that py-spy samples during the load. Raises RuntimeError if any answer is incomplete.
    """
    with run_server(name, paths, bench.model, bench.threads, *extra) as server:
        run_load(server.url, bench.warm_up_queries(num_warm_up), clients=8, topk=bench.topk)
        before, cpu_before = server.counters(), server.cpu_seconds()
        with record_profile(server.pid, profile) if profile else contextlib.nullcontext():
            clients = 1 if batch > 1 else bench.clients
            report = run_load(
                server.url, queries, clients=clients, mode=mode, topk=bench.topk, batch=batch
            )
        cpu_seconds = server.cpu_seconds() - cpu_before
        gained = {k: v - before.get(k, 0.0) for k, v in server.counters().items()}
        run = Run(report, cpu_seconds, server.resident_bytes(), gained)
    if report.num_errors:
        raise RuntimeError(
            f"{name} on {paths.name}: {report.num_errors} of {len(queries)} answers are "
            f"incomplete, expected none; the first error: {report.first_error}"
        )
    return run


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return sum(values) / len(values)


def rate_figures(name: str, runs: Sequence[Run], *, note: str = "") -> list[Figure]:
    """Return the rate and the latencies of a server, as means over its runs."""
    reports = [run.report for run in runs]
    latencies = [
        Figure(f"{name}: p{p}", 1e3 * mean([r.latency(p) for r in reports]), "ms", note=note)
        for p in (50, 99)
    ]
    return [
        Figure(f"{name}: rate", mean([r.rate for r in reports]), "queries/s", note=note),
        *latencies,
    ]


STAGE = re.compile(r'retriever_stage_seconds_sum\{stage="(\w+)"\}')


def cost_figures(name: str, runs: Sequence[Run]) -> list[Figure]:
    """Return processor time, batch size and time by stage of a server, as means over its runs."""
    queries = sum(run.report.num_queries for run in runs)
    cpu_seconds = sum(run.server_cpu for run in runs)
    figures = [Figure(f"{name}: processor time", 1e3 * cpu_seconds / queries, "ms/query")]
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
