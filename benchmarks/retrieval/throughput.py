"""Parts that measure rates: concurrent clients, large requests, repeated queries, and BM25."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.retrieval.answers import count_differences, recall
from benchmarks.retrieval.bench import Bench, Run, cost_figures, mean, measure, rate_figures
from benchmarks.retrieval.figures import Figure
from benchmarks.retrieval.profiling import profile_figures
from benchmarks.retrieval.servers import BASELINES

BATCH = 512
WORKERS = 2
"""Workers of a BM25 server beside the one process: this machine's cores."""
WORKERS_WARM_UP = 1500
"""Queries after which each worker has the bitmaps of common words."""
REPEATS = 5
WINDOW = 10
"""Questions whose repeats are shuffled together: 50 requests, about a second for the baseline."""


def clients(bench: Bench, corpus: str) -> list[Figure]:
    """Compare the rate and p99 of concurrent clients that send distinct queries, one at a time."""
    runs = run_servers(bench, corpus, bench.queries, baseline_queries(bench, corpus))
    return compare(bench, runs, min_speedup=8, max_p99_ratio=0.25)


def batch(bench: Bench, corpus: str) -> list[Figure]:
    """Compare the rate of one client that sends 512 distinct queries per request."""
    num_requests = max(1, len(baseline_queries(bench, corpus)) // BATCH)
    queries = bench.questions[: BATCH * num_requests]
    runs = run_servers(bench, corpus, queries, queries, batch=min(BATCH, len(queries)))
    return compare(bench, runs, min_speedup=1.5)


def repeats(bench: Bench, corpus: str) -> list[Figure]:
    """Compare the rate for queries that repeat within a second, as in a GRPO group."""
    queries = repeat_and_shuffle(bench.queries[: bench.num_queries // REPEATS])
    num_baseline = len(baseline_queries(bench, corpus))
    runs = run_servers(bench, corpus, queries, queries[:num_baseline])
    return compare(bench, runs, min_speedup=20)


def repeat_and_shuffle(queries: Sequence[str], seed: int = 0) -> list[str]:
    """Repeat each query REPEATS times, and shuffle within windows of WINDOW distinct queries."""
    draw = random.Random(seed)
    repeated: list[str] = []
    for start in range(0, len(queries), WINDOW):
        window = list(queries[start : start + WINDOW]) * REPEATS
        draw.shuffle(window)
        repeated += window
    return repeated


def baseline_queries(bench: Bench, corpus: str) -> list[str]:
    """Return the baseline's queries: all of them, or `num_slow` on 1 million passages."""
    return bench.queries if corpus == "44k" else bench.queries[: bench.num_slow]


def run_servers(
    bench: Bench,
    corpus: str,
    queries: list[str],
    for_baseline: list[str],
    *,
    batch: int = 1,
) -> dict[str, list[Run]]:
    """Measure every server in each round, freshly started; the order is reversed every round."""
    names = [*bench.engines, *BASELINES]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(bench.rounds):
        for name in names if number % 2 == 0 else reversed(names):
            sent = for_baseline if name in BASELINES else queries
            runs[name].append(measure(bench, name, bench.paths(corpus), sent, batch=batch))
    return runs


def compare(
    bench: Bench,
    runs: Mapping[str, Sequence[Run]],
    min_speedup: float,
    max_p99_ratio: float | None = None,
) -> list[Figure]:
    """Return each server's figures, then the comparison of ours with the better baseline."""
    rates = {name: mean([r.report.rate for r in rounds]) for name, rounds in runs.items()}
    p99s = {name: mean([r.report.latency(99) for r in rounds]) for name, rounds in runs.items()}
    best_rate = max(rates[name] for name in BASELINES)
    best_p99 = min(p99s[name] for name in BASELINES)
    figures = []
    for name, rounds in runs.items():
        figures += rate_figures(name, rounds, note=f"{rounds[0].report.num_queries} queries")
        figures += cost_figures(name, rounds)
    for name in bench.engines:
        speedup = rates[name] / best_rate
        figures.append(Figure(f"{name} / baseline: rate", speedup, "x", at_least=min_speedup))
        if max_p99_ratio is not None:
            ratio = p99s[name] / best_p99
            figures.append(Figure(f"{name} / baseline: p99", ratio, "x", at_most=max_p99_ratio))
        figures.append(_recall_figure(name, runs) if "@" in name else _equal_figure(name, runs))
    return figures


def _equal_figure(name: str, runs: Mapping[str, Sequence[Run]]) -> Figure:
    """Count the queries with other hits than the baseline's, in the first run of each."""
    ours = _hits(runs[name][0])
    theirs = _hits(runs[BASELINES[0]][0])
    count = count_differences(ours[: len(theirs)], theirs)
    return Figure(
        f"{name}: answers that differ from the baseline's",
        count,
        "queries",
        at_most=0,
        note=f"of {len(theirs)}; the order of scores within 1e-5 is ignored",
    )


def _recall_figure(name: str, runs: Mapping[str, Sequence[Run]]) -> Figure:
    """Return the share of the baseline's documents that an encoder of lower precision finds."""
    ours, theirs = _hits(runs[name][0]), _hits(runs[BASELINES[0]][0])
    share = recall(ours[: len(theirs)], theirs)
    return Figure(f"{name}: share of the baseline's documents", 100 * share, "%")


def _hits(run: Run) -> list[list[dict[str, object]] | None]:
    """Return the hits per query of a run without errors, in the order of the queries."""
    return [hits for result in run.report.answers if result is not None for hits in result]


def bm25(bench: Bench, corpus: str) -> list[Figure]:
    """Measure BM25 with concurrent clients, over raw connections and with RetrievalClient.

    Also over raw connections to `WORKERS` workers.
    """
    paths, queries = bench.paths(corpus), bench.questions
    figures: list[Figure] = []
    for mode in ("raw", "client"):
        runs = [measure(bench, "bm25", paths, queries, mode=mode) for _ in range(bench.rounds)]
        rate, *latencies = rate_figures(mode, runs, note=f"{len(queries)} queries")
        min_rate = 1500.0 if mode == "raw" else None
        figures += [replace(rate, at_least=min_rate), *latencies]
        figures += cost_figures(f"{mode}, server", runs)
        generator_ms = 1e3 * mean([r.report.cpu_seconds for r in runs]) / len(queries)
        figures.append(Figure(f"{mode}, generator: processor time", generator_ms, "ms/query"))
    flags = ("--workers", str(WORKERS))
    runs = [
        measure(bench, "bm25", paths, queries, extra=flags, num_warm_up=WORKERS_WARM_UP)
        for _ in range(bench.rounds)
    ]
    note = f"{WORKERS_WARM_UP} queries before"
    rate, *latencies = rate_figures(f"raw, {WORKERS} workers", runs, note=note)
    figures += [replace(rate, at_least=3000.0 if corpus == "1m" else None), *latencies]
    if bench.profile:
        path = bench.cache / "profiles" / f"bm25-{corpus}.txt"
        measure(bench, "bm25", paths, queries, profile=path)
        figures += profile_figures(path)
    return figures
