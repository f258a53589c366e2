"""Parts with concurrent clients: distinct queries, one large request, repeats, and BM25."""

import random
from collections.abc import Mapping, Sequence

from benchmarks.retrieval.answers import differences, recall
from benchmarks.retrieval.bench import Bench, Run, cost_figures, mean, measure, rate_figures
from benchmarks.retrieval.figures import Figure
from benchmarks.retrieval.profiling import profile_figures
from benchmarks.retrieval.servers import BASELINES

BATCH = 512
REPEATS = 5
WINDOW = 10
"""Questions whose repeats mix: 50 requests, which even the baseline answers in about a second."""


def clients(bench: Bench, corpus: str) -> list[Figure]:
    """64 clients, one distinct query each at a time: rate and p99 against the baseline."""
    runs = contest(bench, corpus, bench.asked, slow_asked(bench, corpus))
    return compare(bench, runs, rate_bar=8, p99_bar=0.25)


def batch(bench: Bench, corpus: str) -> list[Figure]:
    """One client that sends 512 distinct queries in one request."""
    num_requests = max(1, len(slow_asked(bench, corpus)) // BATCH)
    queries = bench.questions[: BATCH * num_requests]
    runs = contest(bench, corpus, queries, queries, batch=min(BATCH, len(queries)))
    return compare(bench, runs, rate_bar=1.5)


def repeats(bench: Bench, corpus: str) -> list[Figure]:
    """Every query five times within a second, as the samples of a GRPO group send them."""
    asked = repeated(bench.asked[: bench.num_queries // REPEATS])
    runs = contest(bench, corpus, asked, asked[: len(slow_asked(bench, corpus))])
    return compare(bench, runs, rate_bar=20)


def repeated(queries: Sequence[str], seed: int = 0) -> list[str]:
    """Each query REPEATS times, the repeats of WINDOW neighbouring queries shuffled together."""
    order = random.Random(seed)
    result: list[str] = []
    for start in range(0, len(queries), WINDOW):
        some = list(queries[start : start + WINDOW]) * REPEATS
        order.shuffle(some)
        result += some
    return result


def slow_asked(bench: Bench, corpus: str) -> list[str]:
    """What the baseline is asked: all queries, or a stated sample on 1 million passages."""
    return bench.asked if corpus == "44k" else bench.asked[: bench.num_slow]


def contest(
    bench: Bench, corpus: str, asked: list[str], slow: list[str], *, batch: int = 1
) -> dict[str, list[Run]]:
    """Every server in turn, each time freshly started; the order turns around every round."""
    names = [*bench.engines, *BASELINES]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for turn in range(bench.rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            queries = slow if name in BASELINES else asked
            runs[name].append(measure(bench, name, bench.place(corpus), queries, batch=batch))
    return runs


def compare(
    bench: Bench,
    runs: Mapping[str, Sequence[Run]],
    rate_bar: float,
    p99_bar: float | None = None,
) -> list[Figure]:
    """Each server's figures, then ours against the better of the baselines; equal answers."""
    rates = {name: mean([r.report.rate for r in some]) for name, some in runs.items()}
    tails = {name: mean([r.report.latency(99) for r in some]) for name, some in runs.items()}
    best_rate = max(rates[name] for name in BASELINES)
    best_tail = min(tails[name] for name in BASELINES)
    figures = []
    for name, some in runs.items():
        figures += rate_figures(name, some, note=f"{some[0].report.num_queries} queries")
        figures += cost_figures(name, some)
    for name in bench.engines:
        figures.append(Figure(f"{name} / baseline: rate", rates[name] / best_rate, "x", rate_bar))
        if p99_bar is not None:
            figures.append(_tail_figure(name, tails[name] / best_tail, p99_bar))
        figures.append(_recall_figure(name, runs) if "@" in name else _equal_figure(name, runs))
    return figures


def _tail_figure(name: str, ratio: float, bar: float) -> Figure:
    return Figure(f"{name} / baseline: p99", ratio, "x", at_most=bar)


def _equal_figure(name: str, runs: Mapping[str, Sequence[Run]]) -> Figure:
    """Queries that are not answered as the baseline answers them, in the first run of each."""
    ours = _answers(runs[name][0])
    theirs = _answers(runs[BASELINES[0]][0])
    count = differences(ours[: len(theirs)], theirs)
    return Figure(
        f"{name}: answers that differ from the baseline's",
        count,
        "queries",
        at_most=0,
        note=f"of {len(theirs)}; the order of scores within 1e-5 is ignored",
    )


def _recall_figure(name: str, runs: Mapping[str, Sequence[Run]]) -> Figure:
    """How many of the baseline's documents an encoder of lower precision finds."""
    ours, theirs = _answers(runs[name][0]), _answers(runs[BASELINES[0]][0])
    share = recall(ours[: len(theirs)], theirs)
    return Figure(f"{name}: share of the baseline's documents", 100 * share, "%")


def _answers(run: Run) -> list[list[dict[str, object]] | None]:
    """The hits per query of a run without errors, in the order of the queries."""
    return [hits for result in run.report.answers if result is not None for hits in result]


def bm25(bench: Bench, corpus: str) -> list[Figure]:
    """BM25 with 64 clients: raw connections, and through the merging client."""
    place, queries = bench.place(corpus), bench.questions
    figures: list[Figure] = []
    for mode in ("raw", "client"):
        runs = [measure(bench, "bm25", place, queries, mode=mode) for _ in range(bench.rounds)]
        rate, *latencies = rate_figures(mode, runs, note=f"{len(queries)} queries")
        bar = 1500.0 if mode == "raw" else None
        figures += [Figure(rate.name, rate.value, rate.unit, bar, note=rate.note), *latencies]
        figures += cost_figures(f"{mode}, server", runs)
        own = 1e3 * mean([r.report.cpu_seconds for r in runs]) / len(queries)
        figures.append(Figure(f"{mode}, generator: processor time", own, "ms/query"))
    if bench.profile:
        path = bench.cache / "profiles" / f"bm25-{corpus}.txt"
        measure(bench, "bm25", place, queries, profile=path)
        figures += profile_figures(path)
    return figures
