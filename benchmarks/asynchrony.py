"""Compare the time to the same held-out EM between asynchronous and synchronous training.

`python -m benchmarks.asynchrony --seeds 0 1 2 --staleness 2` trains the tiny policy with the real
trainer (Ray, FSDP2, vLLM, HTTP), synchronously and asynchronously for each seed. The retriever
responds as slowly as a service on the internet: log-normal, median 0.5 s, 99th percentile 5 s;
with `--median 0` it responds at once. Finished runs are not repeated.

Each mode has two runs per seed: one validates during training and shows after how many steps the
EM is reached; the other validates only at the end and shows how long these steps take. In a single
run, trajectories that are sampled ahead during a validation would seem to cost no time.

`python -m benchmarks.asynchrony --steps 200 --staleness 4` checks whether long training is stable,
with one run per seed. A run has collapsed if the guard reports a collapse, or if a validation EM is
below three quarters of the best so far. The figures are written to `lasting.json`; the exit status
is 1 if a run collapsed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Self

import httpx
from fastapi import FastAPI, Request, Response
from rich.console import Console
from scipy.stats import t as student_t

from benchmarks.algorithms.runner import BASE, ROOT, Result, retriever
from benchmarks.algorithms.variants import VARIANTS
from tests.apps import running
from verl.errors import ConfigError
from verl.logs import exit_status

SIGMA = math.log(10) / 2.3263
"""Standard deviation of the latency's logarithm: the 99th percentile is ten times the median."""
COLLAPSED = 2.0
"""Value of `guard/health` for a collapse."""
MIN_EM_SHARE = 0.75
"""Share of the best EM below which a validation is a collapse, as in the proof `collapse`."""
LONG_RUN = ("trainer.test_freq=10", "trainer.guard.action=warn")
NO_VALIDATION = ("trainer.test_freq=-1", "trainer.val_before_train=false")
console = Console(soft_wrap=True, highlight=False)


def delaying_proxy(target: str, median: float, seed: int = 0) -> FastAPI:
    """Return a proxy for the server at `target` that delays searches; `median` in seconds."""
    app, draw = FastAPI(), random.Random(seed)
    client = httpx.AsyncClient(base_url=target, timeout=60)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(path: str, request: Request) -> Response:
        if path == "retrieve" and median:
            await asyncio.sleep(draw.lognormvariate(math.log(median), SIGMA))
        headers = {"content-type": request.headers.get("content-type", "application/json")}
        body = await request.body()
        response = await client.request(request.method, f"/{path}", content=body, headers=headers)
        media_type = response.headers.get("content-type")
        return Response(response.content, response.status_code, media_type=media_type)

    return app


@contextlib.contextmanager
def slow_retriever(median: float, seed: int = 0) -> Iterator[str]:
    """Serve the example's corpus with delayed searches; yields the URL of `/retrieve`."""
    with retriever() as url:
        proxy = delaying_proxy(url.removesuffix("/retrieve"), median, seed)
        with running(proxy) as slow_url:
            yield f"{slow_url}/retrieve"


def train(
    folder: Path, seed: int, url: str, staleness: int, extra: Sequence[str], base: Path = BASE
) -> None:
    """Train in a separate process, unless `folder` has the result of this run."""
    if Result.read(folder) is not None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.algorithms.runner", "--seed", str(seed)]
    command += ["--out", str(folder), "--url", url, "--base", str(base), *VARIANTS["grpo"]]
    command += [f"actor_rollout_ref.rollout.max_staleness={staleness}", *extra]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "log").open("wb") as log:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=True)


@dataclass(frozen=True)
class ModeResult:
    """Result of one mode (synchronous or asynchronous) with one seed."""

    steps: int
    """Steps until a validation reached the EM."""
    seconds: float
    """Duration of these steps without validations."""
    step_s: float
    """Mean seconds of a step."""
    waiting: float
    """Share of the time in which the trainer waited for trajectories."""
    engine_busy: float
    """Mean share of a step in which the engines had work."""


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Read the logged metrics of all steps."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_mode(folder: Path, min_em: float) -> ModeResult:
    """Read the result of one mode and seed from its runs `curve` and `timed`.

    Raises ConfigError if training does not reach `min_em`, or if the initial policy has it.
    """
    validations = [row for row in read_metrics(folder / "curve") if "val/em" in row]
    reached = next((row for row in validations if row["val/em"] >= min_em), None)
    if reached is None or reached["step"] == 0:
        ems = ", ".join(f"{row['val/em']:.3g}" for row in validations)
        raise ConfigError(
            f"got --em {min_em:g}, but the validations of {folder / 'curve'} have EM {ems}; "
            "expected an EM that a run reaches by training; fix: choose another --em, or train "
            "longer (trainer.total_training_steps=…) into another --out"
        )
    steps = int(reached["step"])
    timed = [row for row in read_metrics(folder / "timed") if "timing_s/step" in row]
    total = sum(row["timing_s/step"] for row in timed)
    waiting = sum(row["timing_s/gen"] for row in timed)
    busy = fmean(row["perf/engine_busy_share"] for row in timed)
    seconds = sum(row["timing_s/step"] for row in timed[:steps])
    return ModeResult(steps, seconds, total / len(timed), waiting / total, busy)


def interval(values: Sequence[float]) -> list[float]:
    """Compute the 95 % confidence interval of the mean with Student's t distribution."""
    if len(values) < 2:
        return [values[0], values[0]]
    quantile = float(student_t.ppf(0.975, df=len(values) - 1))
    half = quantile * stdev(values) / math.sqrt(len(values))
    return [fmean(values) - half, fmean(values) + half]


def compare(out: Path, seeds: Sequence[int], min_em: float) -> dict[str, object]:
    """Return the figures of all seeds, in the form of docs/evidence/asynchrony.json."""
    rows, speedups = [], []
    for seed in seeds:
        synchronous = read_mode(out / "sync" / f"seed_{seed}", min_em)
        asynchronous = read_mode(out / "async" / f"seed_{seed}", min_em)
        rows.append({"seed": seed, "sync": asdict(synchronous), "async": asdict(asynchronous)})
        speedups.append(synchronous.seconds / asynchronous.seconds)
    return {
        "seeds": list(seeds), "em": min_em, "speedup_to_equal_em": fmean(speedups),
        "interval_95": interval(speedups), "runs": rows,
    }  # fmt: skip


@dataclass(frozen=True)
class LongRun:
    """Result of one long run."""

    seed: int
    steps: int
    em: list[float]
    """EM of each validation, before the first step and every ten steps."""
    collapses: list[int]
    """Steps at which the guard reports a collapse or the EM is far below the best so far."""
    skipped_updates: float
    """Sum over steps of the share of updates whose loss or gradient was not finite."""
    staleness: float
    """Mean age of the training tokens in weight versions."""
    seconds: float

    @classmethod
    def read(cls, seed: int, folder: Path) -> Self:
        """Read the result from the run's folder."""
        rows = read_metrics(folder)
        em = list[float]()
        collapses = list[int]()
        for row in rows:
            has_fallen = False
            if "val/em" in row:
                em.append(row["val/em"])
                has_fallen = em[-1] < MIN_EM_SHARE * max(em)
            if has_fallen or row.get("guard/health") == COLLAPSED:
                collapses.append(int(row["step"]))
        steps = [row for row in rows if "timing_s/step" in row]
        return cls(
            seed, len(steps), em, collapses,
            skipped_updates=sum(row.get("actor/skipped_updates", 0.0) for row in steps),
            staleness=fmean(row["rollout/staleness/mean"] for row in steps),
            seconds=sum(row["timing_s/step"] for row in steps),
        )  # fmt: skip


def run_long(args: argparse.Namespace, out: Path) -> int:
    """Make one long run per seed and write `lasting.json`; returns 0 if none collapsed, else 1."""
    results = []
    length = f"trainer.total_training_steps={args.steps}"
    with slow_retriever(args.median) as url:
        for seed in args.seeds:
            folder = out / f"long_{args.steps}" / f"seed_{seed}"
            train(folder, seed, url, args.staleness, [*LONG_RUN, length, *args.extra])
            results.append(LongRun.read(seed, folder))
            console.print(results[-1])
    summary = {"staleness": args.staleness, "median_s": args.median, "options": args.extra,
               "runs": [asdict(result) for result in results]}  # fmt: skip
    (out / "lasting.json").write_text(json.dumps(summary, indent=1) + "\n")
    return int(any(result.collapses for result in results))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.asynchrony", description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, default=2, help="max_staleness of the async runs")
    parser.add_argument(
        "--median", type=float, default=0.5, help="median seconds of a search; 0: no delay"
    )
    parser.add_argument("--em", type=float, default=0.9, help="held-out EM to reach")
    parser.add_argument(
        "--steps", type=int, help="make one run of this length per seed: does it collapse?"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "asynchrony")
    parser.add_argument("extra", nargs="*", help="further options of all runs, key=value")
    args = parser.parse_args(arguments)
    out = args.out.resolve() / f"median_{args.median:g}_staleness_{args.staleness}"
    if args.steps is not None:
        return run_long(args, out)
    with slow_retriever(args.median) as url:
        for seed in args.seeds:
            for mode, staleness in (("sync", 0), ("async", args.staleness)):
                folder = out / mode / f"seed_{seed}"
                train(folder / "curve", seed, url, staleness, args.extra)
                train(folder / "timed", seed, url, staleness, [*args.extra, *NO_VALIDATION])
                console.print(mode, seed, read_mode(folder, args.em))
    result = compare(out, args.seeds, args.em)
    result |= {"median_s": args.median, "staleness": args.staleness, "options": args.extra}
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    console.print_json(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
