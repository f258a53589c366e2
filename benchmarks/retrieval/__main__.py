"""Measure the retrieval server: `python -m benchmarks.retrieval [--parts clients-44k ...]`.

Each finished part is a JSON line in `<cache>/results.jsonl`, so an interrupted run continues with
the missing parts. Speeds are compared only within one part, in which servers alternate on the same
machine.
"""

import argparse
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.retrieval import corpora, engines, report, sizing, throughput
from benchmarks.retrieval.bench import Bench
from benchmarks.retrieval.figures import Figure
from benchmarks.retrieval.profiling import find_py_spy
from benchmarks.retrieval.servers import stop_servers_when_terminated
from search_r1.retrieval.errors import SearchError

logger = logging.getLogger(__name__)

Part = Callable[[Bench, str], list[Figure]]
PARTS: dict[str, tuple[Part, str]] = {
    "clients-44k": (throughput.clients, "44k"),
    "batch-44k": (throughput.batch, "44k"),
    "repeats-44k": (throughput.repeats, "44k"),
    "bm25-44k": (throughput.bm25, "44k"),
    "engines-44k": (engines.engines, "44k"),
    "documents-1m": (engines.documents, "1m"),
    "startup-1m": (engines.startup, "1m"),
    "bm25-1m": (throughput.bm25, "1m"),
    "clients-1m": (throughput.clients, "1m"),
    "batch-1m": (throughput.batch, "1m"),
    "repeats-1m": (throughput.repeats, "1m"),
    "sizing": (sizing.sizing, "1m"),
}
"""Function and corpus of each part, in the order in which they are measured."""
TITLES = {
    "clients": "64 clients, one distinct query each at a time: rate and p99 against the baseline.",
    "batch": "One client that sends 512 distinct queries in one request.",
    "repeats": "Every query five times within a second, as the samples of a GRPO group send them.",
    "bm25": "BM25 with 64 clients: raw connections, and through the merging client.",
    "engines": "Recall@3 against exact search, bytes per million passages, and queries per second.",
    "documents": "Documents for 256 queries × 3: ours, and the baseline's row by row.",
    "startup": "Seconds from the start of the process to its first healthy answer, index present.",
    "sizing": "Memory of 21 million × 768 by engine, the machines that hold it, and the rate here.",
}
"""Titles of the results, by the first word of a part's name."""
TRIAL = {"num_queries": 200, "num_slow": 20, "rounds": 1}


def run_part(bench: Bench, part: str, *, is_trial: bool) -> report.PartResult:
    """Measure one part."""
    measure, corpus = PARTS[part]
    names = ("num_queries", "num_slow", "rounds", "threads", "clients", "topk")
    settings = {name: getattr(bench, name) for name in names}
    figures = measure(bench, corpus)
    title = TITLES[part.partition("-")[0]]
    return report.PartResult(part, title, figures, settings, report.machine(), is_trial)


def run_all(bench: Bench, parts: list[str], results: Path, *, is_trial: bool, again: bool) -> bool:
    """Measure the parts without a result, or all if `again`; returns whether no part failed."""
    all_finished = True
    for part in parts:
        if part in report.load(results) and not again:
            logger.info("%s: measured before (--again repeats it)", part)
            continue
        start = time.perf_counter()
        logger.info("%s: measuring", part)
        try:
            result = run_part(bench, part, is_trial=is_trial)
        except (
            SearchError,
            OSError,
            ValueError,
            RuntimeError,
            subprocess.SubprocessError,
        ) as error:
            logger.error("%s failed, its figures are missing: %s", part, error)
            all_finished = False
            continue
        report.append(results, result)
        logger.info("%s: %.0f s", part, time.perf_counter() - start)
        sys.stdout.write(report.table(result) + "\n")
        sys.stdout.flush()
    return all_finished


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.retrieval", description=__doc__)
    add = parser.add_argument
    corpora.add_path_flags(parser)
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all, in order")
    add("--results", type=Path, help="JSON lines; default: <cache>/results.jsonl")
    add("--again", action="store_true", help="also measure parts that have a result")
    add("--trial", action="store_true", help="small counts, to check that everything works")
    add("--engines", nargs="+", default=list(Bench.engines), help="our dense engines: faiss torch")
    add("--rounds", type=int, default=Bench.rounds, help="runs of each server")
    add("--threads", type=int, default=os.cpu_count(), help="threads of each server")
    add("--profile", action="store_true", help="also sample the BM25 server with py-spy")
    add("--write-docs", action="store_true", help="only write docs/evidence/retrieval.md")
    return parser


def _bench(args: argparse.Namespace) -> Bench:
    model = args.model or corpora.encoder_folder()
    questions = corpora.questions(args.data)
    corpora.prepare(args.cache, args.data, model)
    return Bench(
        args.cache,
        model,
        questions,
        args.threads,
        engines=tuple(args.engines),
        profile=args.profile,
        **(TRIAL if args.trial else {"rounds": args.rounds}),
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stop_servers_when_terminated()
    args = _parser().parse_args(argv)
    name = "trial.jsonl" if args.trial else "results.jsonl"
    results = args.results or args.cache / name
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    try:
        if args.write_docs:
            report.write_docs(report.load(results))
            return 0
        if args.profile:
            find_py_spy()
        bench = _bench(args)
        all_finished = run_all(bench, args.parts, results, is_trial=args.trial, again=args.again)
    except (SearchError, ValueError) as error:
        sys.stderr.write(f"benchmarks.retrieval: {error}\n")
        return 2
    sys.stdout.write(report.verdicts(report.load(results).values()) + f"\nresults: {results}\n")
    return 0 if all_finished else 1


if __name__ == "__main__":
    sys.exit(main())
