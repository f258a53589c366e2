"""A real server under load for minutes: no errors, and a resident set that stays flat.

`python -m benchmarks.retrieval.soak --minutes 10 --clients 64`. The queries are a random mix of
fresh and repeated ones; the resident set is sampled every second and judged after the warm-up.
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
from benchmarks.retrieval.figures import number, percentile, slope
from benchmarks.retrieval.load import Answer, complete, drive, render
from benchmarks.retrieval.servers import Running, serving, stop_servers_when_terminated

MIB = 2**20
WARM_UP = 0.3
"""Share of the samples that is not judged: caches fill, mapped pages are touched."""
MAX_GROWTH = 0.02
"""Largest growth that still counts as flat, as a share of the mean resident set."""


@dataclass
class Soak:
    """What was seen."""

    num_answers: int = 0
    num_errors: int = 0
    first_error: str = ""
    latencies: list[float] = field(default_factory=list, repr=False)
    samples: list[tuple[float, int, int]] = field(default_factory=list, repr=False)
    """Seconds since the start, resident bytes, and those that are no mapped file."""


@dataclass(frozen=True)
class Verdict:
    """Whether memory is flat."""

    mib_per_minute: float
    growth: float
    """Fitted growth over the judged samples, as a share of their mean."""

    @property
    def is_flat(self) -> bool:
        """Whether the growth is within what counts as flat."""
        return self.growth <= MAX_GROWTH


def judge(seconds: Sequence[float], resident: Sequence[float]) -> Verdict:
    """Fit a line to the resident bytes after the warm-up."""
    first = int(len(seconds) * WARM_UP)
    seconds, resident = seconds[first:], resident[first:]
    if len(seconds) < 2:
        raise ValueError(f"{len(seconds)} samples after the warm-up; expected 2 or more")
    rate = slope(seconds, resident)
    mean = sum(resident) / len(resident)
    return Verdict(60 * rate / MIB, rate * (seconds[-1] - seconds[0]) / mean)


def mixed(questions: Sequence[str], share_fresh: float, seed: int = 0) -> Iterator[str]:
    """Endless queries: fresh ones that were never asked, and real questions again and again."""
    order = random.Random(seed)
    number_of_fresh = 0
    while True:
        if order.random() < share_fresh:
            number_of_fresh += 1
            first, second = order.sample(questions, 2)
            yield f"{first} {second} {number_of_fresh}"
        else:
            yield order.choice(questions)


async def soak(
    server: Running, questions: Sequence[str], seconds: float, clients: int, share_fresh: float
) -> Soak:
    """Load the server for `seconds`."""
    seen, start, topk = Soak(), time.perf_counter(), 3

    def requests() -> Iterator[tuple[int, bytes]]:
        for i, query in enumerate(mixed(questions, share_fresh)):
            if time.perf_counter() - start > seconds:
                return
            yield i, render(server.url, [query], topk)

    def record(index: int, answer: Answer) -> None:
        if answer.status == 200 and complete(answer.body, 1, topk) is not None:
            seen.num_answers += 1
            seen.latencies.append(answer.seconds)
        else:
            seen.num_errors += 1
            seen.first_error = seen.first_error or f"{answer.status}: {answer.body[:200]!r}"

    async def sample() -> None:
        while True:
            resident, anonymous = server.resident_bytes()
            seen.samples.append((time.perf_counter() - start, resident, anonymous))
            await asyncio.sleep(1.0)

    sampling = asyncio.ensure_future(sample())
    await drive(server.url, requests(), record, clients)
    sampling.cancel()
    return seen


def report(seen: Soak, seconds: float, results: Path) -> bool:
    """Write the samples as JSON and the verdict in words; whether all is well."""
    times, resident, anonymous = zip(*seen.samples, strict=True)
    whole, own = judge(times, resident), judge(times, anonymous)
    results.parent.mkdir(parents=True, exist_ok=True)
    summary = {"rate": seen.num_answers / seconds, "resident": asdict(whole), "own": asdict(own)}
    results.write_text(json.dumps({**summary, **asdict(seen), "latencies": []}))
    is_well = whole.is_flat and seen.num_errors == 0 and seen.num_answers > 0
    sys.stdout.write(
        f"{seen.num_answers} answers, {seen.num_errors} errors {seen.first_error}\n"
        f"{number(seen.num_answers / seconds)} queries/s, "
        f"p99 {number(1e3 * percentile(seen.latencies or [0.0], 99))} ms\n"
        f"resident set: {resident[0] / MIB:.0f} MiB at first, {resident[-1] / MIB:.0f} at last, "
        f"{whole.mib_per_minute:+.2f} MiB/minute after the warm-up ({whole.growth:+.2%}; without "
        f"mapped files {own.mib_per_minute:+.2f} MiB/minute)\n"
        f"bar: no errors, growth ≤ {MAX_GROWTH:.0%}: {'met' if is_well else 'NOT MET'}\n"
        f"samples: {results}\n"
    )
    return is_well


def main(argv: list[str] | None = None) -> int:
    """Command-line entry; returns the exit status: 0 if memory is flat and nothing failed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stop_servers_when_terminated()
    parser = argparse.ArgumentParser(prog="benchmarks.retrieval.soak", description=__doc__)
    corpora.add_place_flags(parser)
    add = parser.add_argument
    add("--minutes", type=float, default=10.0)
    add("--clients", type=int, default=64)
    add("--engine", default="faiss", help="bm25, faiss or torch")
    add("--corpus", choices=("44k", "1m"), default="44k")
    add("--share_fresh", type=float, default=0.5, help="share of queries never asked before")
    add("--cache_entries", type=int, default=5000, help="of the server: filled in the warm-up")
    add("--server_flags", nargs=argparse.REMAINDER, default=[], help="further flags, at the end")
    args = parser.parse_args(argv)
    model = args.model or corpora.encoder_folder()
    place, seconds = corpora.Place(args.cache, args.corpus), 60 * args.minutes
    if args.corpus == "44k":
        corpora.prepare_real(place, args.data, model, is_dense=args.engine != "bm25")
    else:
        corpora.prepare(args.cache, args.data, model)
    questions, threads = corpora.questions(args.data), os.cpu_count() or 1
    flags = ["--cache_entries", str(args.cache_entries), *args.server_flags]
    with serving(args.engine, place, model, threads, *flags) as server:
        work = soak(server, questions, seconds, args.clients, args.share_fresh)
        seen = asyncio.run(work)
    is_well = report(seen, seconds, args.cache / f"soak-{args.engine}-{args.corpus}.json")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
