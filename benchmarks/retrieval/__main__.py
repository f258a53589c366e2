"""Measures the retrieval service: `python -m benchmarks.retrieval [--parts clients-44k ...]`.

Every finished part is a JSON line in `<cache>/results.jsonl`, so that a run that was cut off goes
on with what is missing. Speeds are ratios within one part: servers take turns on one machine.
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
from search_r1.search.errors import SearchError

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
"""What is measured, on which corpus, in this order."""
TRIAL = {"num_queries": 200, "num_slow": 20, "rounds": 1}


def run_part(bench: Bench, part: str, *, is_trial: bool) -> report.PartResult:
    """Measure one part."""
    function, corpus = PARTS[part]
    title = (function.__doc__ or "").strip()
    facts = {
        name: getattr(bench, name) for name in ("num_queries", "num_slow", "rounds", "threads")
    }
    settings = {**facts, "clients": bench.clients, "topk": bench.topk}
    figures = function(bench, corpus)
    return report.PartResult(part, title, figures, settings, report.machine(), is_trial)


def run_all(bench: Bench, parts: list[str], results: Path, *, is_trial: bool, again: bool) -> bool:
    """Measure what is not measured yet; whether every part came to its end."""
    is_whole = True
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
            is_whole = False
            continue
        report.append(results, result)
        logger.info("%s: %.0f s", part, time.perf_counter() - start)
        sys.stdout.write(report.table(result) + "\n")
        sys.stdout.flush()
    return is_whole


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.retrieval", description=__doc__)
    add = parser.add_argument
    corpora.add_place_flags(parser)
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all, in order")
    add("--results", type=Path, help="JSON lines; default: <cache>/results.jsonl")
    add("--again", action="store_true", help="measure parts that have a result, too")
    add("--trial", action="store_true", help="small counts, to see that all works")
    add("--engines", nargs="+", default=list(Bench.engines), help="our dense engines: faiss torch")
    add("--rounds", type=int, default=Bench.rounds, help="runs of every server")
    add("--threads", type=int, default=os.cpu_count(), help="of every server")
    add("--profile", action="store_true", help="sample the BM25 server with py-spy, too")
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
    """Command-line entry; returns the exit status."""
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
        is_whole = run_all(bench, args.parts, results, is_trial=args.trial, again=args.again)
    except (SearchError, ValueError) as error:
        sys.stderr.write(f"benchmarks.retrieval: {error}\n")
        return 2
    found = report.load(results)
    sys.stdout.write(report.verdicts(found.values()) + f"\nresults: {results}\n")
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
