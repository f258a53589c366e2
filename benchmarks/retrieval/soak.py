"""Soak test: a real server under load for minutes must stay free of errors and of memory growth.

`python -m benchmarks.retrieval.soak --minutes 10 --clients 64`. The queries are a random mix of new
and repeated ones. The resident set is sampled every second; its growth is fitted after the warm-up.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.retrieval import corpora
from benchmarks.retrieval.figures import format_number, percentile, slope
from benchmarks.retrieval.load import RawResponse, complete_result, render_request, send_all
from benchmarks.retrieval.servers import RunningServer, run_server, stop_servers_when_terminated

MIB = 2**20
WARM_UP = 0.3
"""Share of the samples at the start that is ignored, while caches fill and pages are mapped."""
MAX_GROWTH = 0.02
"""Maximum growth that counts as flat, as a share of the mean resident set."""


@dataclass
class SoakResult:
    """Counts and samples of one soak test."""

    num_answers: int = 0
    num_errors: int = 0
    first_error: str = ""
    latencies: list[float] = field(default_factory=list, repr=False)
    samples: list[tuple[float, int, int]] = field(default_factory=list, repr=False)
    """Seconds since the start, and resident bytes in total and without mapped files."""


@dataclass(frozen=True)
class MemoryGrowth:
    """Fitted growth of the memory after the warm-up."""

    mib_per_minute: float
    growth: float
    """Growth over the fitted samples, as a share of their mean."""

    @property
    def is_flat(self) -> bool:
        """Whether the growth is at most MAX_GROWTH."""
        return self.growth <= MAX_GROWTH


def fit_growth(seconds: Sequence[float], resident: Sequence[float]) -> MemoryGrowth:
    """Fit a line to the resident bytes after the warm-up."""
    first = int(len(seconds) * WARM_UP)
    seconds, resident = seconds[first:], resident[first:]
    if len(seconds) < 2:
        raise ValueError(f"{len(seconds)} samples after the warm-up; expected 2 or more")
    rate = slope(seconds, resident)
    mean = sum(resident) / len(resident)
    return MemoryGrowth(60 * rate / MIB, rate * (seconds[-1] - seconds[0]) / mean)


def mix_queries(questions: Sequence[str], share_fresh: float, seed: int = 0) -> Iterator[str]:
    """Yield endless queries: new ones with the probability `share_fresh`, else real questions."""
    draw = random.Random(seed)
    num_fresh = 0
    while True:
        if draw.random() < share_fresh:
            num_fresh += 1
            first, second = draw.sample(questions, 2)
            yield f"{first} {second} {num_fresh}"
        else:
            yield draw.choice(questions)


async def soak(
    server: RunningServer,
    questions: Sequence[str],
    seconds: float,
    clients: int,
    share_fresh: float,
) -> SoakResult:
    """Load the server for `seconds`."""
    result, began, topk = SoakResult(), time.perf_counter(), 3

    def requests() -> Iterator[tuple[int, bytes]]:
        for i, query in enumerate(mix_queries(questions, share_fresh)):
            if time.perf_counter() - began > seconds:
                return
            yield i, render_request(server.url, [query], topk)

    def record(index: int, response: RawResponse) -> None:
        if response.status == 200 and complete_result(response.body, 1, topk) is not None:
            result.num_answers += 1
            result.latencies.append(response.seconds)
        else:
            result.num_errors += 1
            error = f"{response.status}: {response.body[:200]!r}"
            result.first_error = result.first_error or error

    async def sample_memory() -> None:
        while True:
            resident, unmapped = server.resident_bytes()
            result.samples.append((time.perf_counter() - began, resident, unmapped))
            await asyncio.sleep(1.0)

    sampling = asyncio.ensure_future(sample_memory())
    await send_all(server.url, requests(), record, clients)
    sampling.cancel()
    return result


def report(result: SoakResult, seconds: float, path: Path) -> bool:
    """Write the result to `path` as JSON and print a summary; returns whether the target is met."""
    times, resident, unmapped = zip(*result.samples, strict=True)
    total_growth, unmapped_growth = fit_growth(times, resident), fit_growth(times, unmapped)
    rate = result.num_answers / seconds
    growth = {"resident": asdict(total_growth), "own": asdict(unmapped_growth)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rate": rate, **growth, **asdict(result), "latencies": []}))
    is_met = total_growth.is_flat and result.num_errors == 0 and result.num_answers > 0
    sys.stdout.write(
        f"{result.num_answers} answers, {result.num_errors} errors {result.first_error}\n"
        f"{format_number(rate)} queries/s, "
        f"p99 {format_number(1e3 * percentile(result.latencies or [0.0], 99))} ms\n"
        f"resident set: {resident[0] / MIB:.0f} MiB at first, {resident[-1] / MIB:.0f} at last, "
        f"{total_growth.mib_per_minute:+.2f} MiB/minute after the warm-up "
        f"({total_growth.growth:+.2%}; without mapped files "
        f"{unmapped_growth.mib_per_minute:+.2f} MiB/minute)\n"
        f"target: no errors, growth ≤ {MAX_GROWTH:.0%}: {'met' if is_met else 'NOT MET'}\n"
        f"samples: {path}\n"
    )
    return is_met


def main(argv: list[str] | None = None) -> int:
    """Run the soak test; returns 0 if memory is flat and nothing failed, else 1."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stop_servers_when_terminated()
    parser = argparse.ArgumentParser(prog="benchmarks.retrieval.soak", description=__doc__)
    corpora.add_path_flags(parser)
    add = parser.add_argument
    add("--minutes", type=float, default=10.0)
    add("--clients", type=int, default=64)
    add("--engine", default="faiss", help="bm25, faiss or torch")
    add("--corpus", choices=("44k", "1m"), default="44k")
    add("--share_fresh", type=float, default=0.5, help="share of queries that are new")
    add("--cache_entries", type=int, default=5000, help="server's cache; filled in the warm-up")
    add("--server_flags", nargs=argparse.REMAINDER, default=[], help="further server flags, last")
    args = parser.parse_args(argv)
    model = args.model or corpora.encoder_folder()
    paths, seconds = corpora.CorpusPaths(args.cache, args.corpus), 60 * args.minutes
    if args.corpus == "44k":
        corpora.prepare_real(paths, args.data, model, is_dense=args.engine != "bm25")
    else:
        corpora.prepare(args.cache, args.data, model)
    questions, threads = corpora.questions(args.data), os.cpu_count() or 1
    flags = ["--cache_entries", str(args.cache_entries), *args.server_flags]
    with run_server(args.engine, paths, model, threads, *flags) as server:
        result = asyncio.run(soak(server, questions, seconds, args.clients, args.share_fresh))
    path = args.cache / f"soak-{args.engine}-{args.corpus}.json"
    return 0 if report(result, seconds, path) else 1


if __name__ == "__main__":
    sys.exit(main())
