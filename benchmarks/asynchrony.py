"""Time to the same held-out EM, sampling ahead against sampling and training in turns.

`python -m benchmarks.asynchrony --seeds 0 1 2 --staleness 2` trains the tiny policy by the real
trainer (Ray, FSDP2, vLLM, HTTP) both ways for each seed, over a retriever whose answers take as
long as those of a service on the net: log-normal, median 0.5 s, 99th percentile 5 s. With
`--median 0` it answers at once. A run that has its result is not repeated.

Each way has two runs for a seed: one that validates says after how many steps the EM is reached;
one that does only at its end says how long so many steps take. What is sampled ahead during a
validation would otherwise look as if it had cost nothing.

`python -m benchmarks.asynchrony --steps 200 --staleness 4` asks whether it lasts: for each seed one
run of so many steps, which has collapsed where the guard says so, or where a validation is below
three quarters of the best so far. `lasting.json` has the figures, the exit status says it.
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

from benchmarks.algorithms.runner import BASE, ROOT, Result, prepare, retriever
from benchmarks.algorithms.variants import VARIANTS
from tests.apps import running
from verl.errors import ConfigError
from verl.logs import exit_status

SIGMA = math.log(10) / 2.3263
"""Of the latency's logarithm: the 99th percentile is ten times the median."""
COLLAPSED = 2.0
"""`guard/health` of a collapse."""
KEPT_SHARE = 0.75
"""Of the best EM so far: a validation below it is a collapse, as in tests.proofs.collapse."""
LONG = ("trainer.test_freq=10", "trainer.guard.action=warn")
UNVALIDATED = ("trainer.test_freq=-1", "trainer.val_before_train=false")
console = Console(soft_wrap=True, highlight=False)


def delayed(target: str, median: float, seed: int = 0) -> FastAPI:
    """A server in front of the one at `target`, whose searches take longer."""
    app, draw = FastAPI(), random.Random(seed)
    client = httpx.AsyncClient(base_url=target, timeout=60)

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def forward(path: str, request: Request) -> Response:
        if path == "retrieve" and median:
            await asyncio.sleep(draw.lognormvariate(math.log(median), SIGMA))
        headers = {"content-type": request.headers.get("content-type", "application/json")}
        body = await request.body()
        answer = await client.request(request.method, f"/{path}", content=body, headers=headers)
        kind = answer.headers.get("content-type")
        return Response(answer.content, answer.status_code, media_type=kind)

    return app


@contextlib.contextmanager
def slow_retriever(median: float, seed: int = 0) -> Iterator[str]:
    """The address of such a server over the example's corpus."""
    with retriever() as url, running(delayed(url.removesuffix("/retrieve"), median, seed)) as slow:
        yield f"{slow}/retrieve"


def run(
    folder: Path, seed: int, url: str, staleness: int, extra: Sequence[str], base: Path = BASE
) -> None:
    """One run in a process of its own, unless its result is there."""
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
class Way:
    """One way of training under one seed."""

    steps: int
    """Until a validation had the EM."""
    seconds: float
    """Of so many steps without validations between them."""
    step_s: float
    waiting: float
    """Share of the steps in which the trainer waited for trajectories."""
    engine_busy: float


def rows_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of all steps."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def measured(folder: Path, least: float) -> Way:
    """From the folders `curve` and `timed` of one way and seed."""
    validations = [row for row in rows_of(folder / "curve") if "val/em" in row]
    reached = next((row for row in validations if row["val/em"] >= least), None)
    if reached is None or reached["step"] == 0:
        found = ", ".join(f"{row['val/em']:.3g}" for row in validations)
        raise ConfigError(
            f"got --em {least:g}, but the validations of {folder / 'curve'} have EM {found}; "
            "expected an EM that a run reaches by training; fix: choose another --em, or train "
            "longer (trainer.total_training_steps=…) into another --out"
        )
    steps = int(reached["step"])
    timed = [row for row in rows_of(folder / "timed") if "timing_s/step" in row]
    total = sum(row["timing_s/step"] for row in timed)
    waiting = sum(row["timing_s/gen"] for row in timed)
    busy = fmean(row["perf/engine_busy_share"] for row in timed)
    seconds = sum(row["timing_s/step"] for row in timed[:steps])
    return Way(steps, seconds, total / len(timed), waiting / total, busy)


def interval(values: Sequence[float]) -> list[float]:
    """The 95 % interval of a mean, by Student's t."""
    if len(values) < 2:
        return [values[0], values[0]]
    quantile = float(student_t.ppf(0.975, df=len(values) - 1))
    half = quantile * stdev(values) / math.sqrt(len(values))
    return [fmean(values) - half, fmean(values) + half]


def compare(out: Path, seeds: Sequence[int], least: float) -> dict[str, object]:
    """The figures of all seeds, for docs/evidence/asynchrony.json."""
    rows, speedups = [], []
    for seed in seeds:
        sync, ahead = (measured(out / way / f"seed_{seed}", least) for way in ("sync", "async"))
        rows.append({"seed": seed, "sync": asdict(sync), "async": asdict(ahead)})
        speedups.append(sync.seconds / ahead.seconds)
    return {
        "seeds": list(seeds), "em": least, "speedup_to_equal_em": fmean(speedups),
        "interval_95": interval(speedups), "runs": rows,
    }  # fmt: skip


@dataclass(frozen=True)
class Course:
    """What became of one long run."""

    seed: int
    steps: int
    em: list[float]
    """Of each validation, before the first step and every ten steps."""
    collapses: list[int]
    """Steps that the guard calls a collapse, or whose EM is far below the best so far."""
    skipped_updates: float
    """Sum over steps of the share of updates that were not finite."""
    staleness: float
    """Mean age of the tokens that were trained on, in versions."""
    seconds: float

    @classmethod
    def of(cls, seed: int, folder: Path) -> Self:
        """From the run's folder."""
        rows, em, collapses = rows_of(folder), list[float](), list[int]()
        for row in rows:
            em += [row["val/em"]] if "val/em" in row else []
            fell = "val/em" in row and row["val/em"] < KEPT_SHARE * max(em)
            if fell or row.get("guard/health") == COLLAPSED:
                collapses.append(int(row["step"]))
        steps = [row for row in rows if "timing_s/step" in row]
        return cls(
            seed, len(steps), em, collapses,
            skipped_updates=sum(row.get("actor/skipped_updates", 0.0) for row in steps),
            staleness=fmean(row["rollout/staleness/mean"] for row in steps),
            seconds=sum(row["timing_s/step"] for row in steps),
        )  # fmt: skip


def lasting(given: argparse.Namespace, out: Path) -> int:
    """One long run a seed; 0 if none collapsed."""
    courses = []
    length = f"trainer.total_training_steps={given.steps}"
    with slow_retriever(given.median) as url:
        for seed in given.seeds:
            folder = out / f"long_{given.steps}" / f"seed_{seed}"
            run(folder, seed, url, given.staleness, [*LONG, length, *given.extra])
            courses.append(Course.of(seed, folder))
            console.print(courses[-1])
    found = {"staleness": given.staleness, "median_s": given.median, "options": given.extra,
             "runs": [asdict(course) for course in courses]}  # fmt: skip
    (out / "lasting.json").write_text(json.dumps(found, indent=1) + "\n")
    return int(any(course.collapses for course in courses))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.asynchrony", description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, default=2, help="max_staleness of the async runs")
    parser.add_argument(
        "--median", type=float, default=0.5, help="seconds of a search; 0: no delay"
    )
    parser.add_argument("--em", type=float, default=0.9, help="held-out EM that both must reach")
    parser.add_argument("--steps", type=int, help="one run of so many steps: does it collapse?")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "asynchrony")
    parser.add_argument("extra", nargs="*", help="further options of all runs, key=value")
    given = parser.parse_args(arguments)
    out = given.out.resolve() / f"median_{given.median:g}_staleness_{given.staleness}"
    prepare()
    if given.steps is not None:
        return lasting(given, out)
    with slow_retriever(given.median) as url:
        for seed in given.seeds:
            for way, staleness in (("sync", 0), ("async", given.staleness)):
                folder = out / way / f"seed_{seed}"
                run(folder / "curve", seed, url, staleness, given.extra)
                run(folder / "timed", seed, url, staleness, [*given.extra, *UNVALIDATED])
                console.print(way, seed, measured(folder, given.em))
    result = compare(out, given.seeds, given.em)
    result |= {"median_s": given.median, "staleness": given.staleness, "options": given.extra}
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    console.print_json(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
