"""Parts that measure our engines: recall and memory, reading documents, and start-up."""

import random
import time
from collections.abc import Callable

import datasets

from benchmarks.retrieval.answers import Hits, recall
from benchmarks.retrieval.bench import Bench, Run, mean, measure
from benchmarks.retrieval.corpora import build_faiss
from benchmarks.retrieval.figures import Figure, percentile
from benchmarks.retrieval.servers import run_server
from benchmarks.retrieval.sizing import IndexSize, index_sizes
from search_r1.retrieval.corpus import Corpus

VARIANTS = (
    ("faiss", ()),
    ("faiss:HNSW32", ()),
    ("faiss:HNSW32", ("--ef_search", "128")),
    ("faiss:SQfp16", ()),
    ("faiss:SQ8", ()),
    ("torch", ()),
    ("torch:float16", ()),
    ("torch:int8", ()),
)
NUM_DOCUMENTS = 256 * 3
NUM_READS = 100


def engines(bench: Bench, corpus: str) -> list[Figure]:
    """Measure recall@3 against exact search, memory and queries per second of each variant."""
    paths = bench.paths(corpus)
    sizes = index_sizes(paths)
    exact: list[Hits | None] = []
    figures: list[Figure] = []
    for name, extra in VARIANTS:
        engine, _, variant = name.partition(":")
        if engine == "faiss" and variant:
            build_faiss(paths, variant)
        run = measure(bench, name, paths, bench.queries, extra=extra)
        hits = [result[0] if result else None for result in run.report.answers]
        exact = exact or hits  # The first variant, FAISS Flat, is exact.
        label = " ".join((name, *extra))
        figures += _engine_figures(label, run, recall(hits, exact), sizes[name])
    return figures


def _engine_figures(label: str, run: Run, share: float, size: IndexSize) -> list[Figure]:
    million_bytes = size.bytes_per_vector(size.measured_dim) * 1_000_000
    memory = million_bytes / 2**20
    return [
        Figure(f"{label}: recall@3", share, note="of exact FAISS Flat"),
        Figure(f"{label}: memory per million passages", memory, "MiB", note="384 values"),
        Figure(f"{label}: rate", run.report.rate, "queries/s"),
        Figure(f"{label}: server's resident set", run.resident[0] / 2**20, "MiB"),
    ]


def documents(bench: Bench, corpus: str) -> list[Figure]:
    """Measure reading the documents of 256 queries × 3 from our corpus and the baseline's table."""
    path = bench.paths(corpus).corpus
    ours = Corpus.open(path)
    cache = str(bench.cache / "datasets")
    datasets.disable_progress_bars()
    table = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=cache)
    ours_s = _read_times(len(ours), lambda rows: ours.documents(rows))
    table_s = _read_times(len(ours), lambda rows: [table[row] for row in rows])
    note = f"{NUM_DOCUMENTS} random documents, {NUM_READS} times, file in the page cache"
    return [
        Figure("ours: median", 1e3 * percentile(ours_s, 50), "ms", at_most=5, note=note),
        Figure("ours: p99", 1e3 * percentile(ours_s, 99), "ms"),
        Figure("row by row: median", 1e3 * percentile(table_s, 50), "ms"),
        Figure("row by row: p99", 1e3 * percentile(table_s, 99), "ms"),
    ]


def _read_times(num_rows: int, read: Callable[[list[int]], object]) -> list[float]:
    """Return the seconds of each read of random rows, without the first, cold one."""
    draw, times = random.Random(0), []
    for _ in range(NUM_READS + 1):
        rows = [draw.randrange(num_rows) for _ in range(NUM_DOCUMENTS)]
        began = time.perf_counter()
        read(rows)
        times.append(time.perf_counter() - began)
    return times[1:]


def startup(bench: Bench, corpus: str) -> list[Figure]:
    """Measure the seconds from a process's start, with its index, to the first healthy response."""
    figures = []
    for name in ("bm25", *bench.engines):
        seconds = []
        for _ in range(bench.rounds):
            with run_server(name, bench.paths(corpus), bench.model, bench.threads) as server:
                seconds.append(server.start_seconds)
        figures.append(Figure(f"{name}: start", mean(seconds), "s", at_most=5))
    return figures
