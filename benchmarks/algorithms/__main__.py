"""Run all variants, then print the table: `python -m benchmarks.algorithms [--variants …]`.

A run that has its `result.json` is not repeated, so an interrupted benchmark continues where it
stopped. With `--jobs 2` two runs are executed in parallel, each on its own core.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from benchmarks.algorithms.runner import BASE, ROOT, Result, retriever
from benchmarks.algorithms.table import markdown
from benchmarks.algorithms.variants import VARIANTS

console = Console(soft_wrap=True)
children: list[subprocess.Popen[bytes]] = []
"""The processes of all runs so far, which SIGTERM ends."""


@dataclass(frozen=True)
class Run:
    """One variant with one seed, and the folder of all runs."""

    variant: str
    seed: int
    out: Path

    @property
    def folder(self) -> Path:
        """The folder that the run writes to."""
        return self.out / self.variant / f"seed_{self.seed}"

    @property
    def is_done(self) -> bool:
        """Whether the run has a result."""
        return Result.read(self.folder) is not None


def plan(variants: Sequence[str], seeds: Sequence[int], out: Path) -> list[Run]:
    """List all runs, seed by seed, so that an early stop leaves results of every variant."""
    return [Run(variant, seed, out) for seed, variant in itertools.product(seeds, variants)]


def results(variants: Sequence[str], seeds: Sequence[int], out: Path) -> dict[str, list[Result]]:
    """Read the results of the finished runs, by variant and in the order of the seeds."""
    finished: dict[str, list[Result]] = {variant: [] for variant in variants}
    for run in plan(variants, seeds, out):
        result = Result.read(run.folder)
        if result is not None:
            finished[run.variant].append(result)
    return finished


def execute(run: Run, url: str, base: Path, extra: Sequence[str], core: int | None) -> int:
    """Execute one run in a separate process; returns its exit code. Its output goes to `log`."""
    run.folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.algorithms.runner", "--seed", str(run.seed)]
    command += ["--out", str(run.folder), "--url", url, "--base", str(base)]
    command += [] if core is None else ["--core", str(core)]
    command += [*VARIANTS[run.variant], *extra]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (run.folder / "log").open("wb") as log:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        children.append(child)
        return child.wait()


def stop_children(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM: terminate the runs, each of which ends its own processes, and exit."""
    for child in children:
        child.terminate()
    sys.exit(128 + number)


def run_all(runs: Sequence[Run], jobs: int, base: Path, extra: Sequence[str]) -> list[Run]:
    """Execute every run without a result, `jobs` at a time; returns the failed runs."""
    cores: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    for core in sorted(os.sched_getaffinity(0))[:jobs] if jobs > 1 else [None]:
        cores.put(core)
    failed = []

    def execute_one(run: Run, url: str) -> None:
        core, began = cores.get(), time.perf_counter()
        try:
            code = execute(run, url, base, extra, core)
        finally:
            cores.put(core)
        result = Result.read(run.folder)
        if code or result is None:
            failed.append(run)
            console.print(f"{run.variant} seed {run.seed}: failed, see {run.folder / 'log'}")
            return
        seconds = time.perf_counter() - began
        console.print(f"{run.variant} seed {run.seed}: EM {result.final_em:.3f} in {seconds:.0f} s")

    with retriever() as url, ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda run: execute_one(run, url), [run for run in runs if not run.is_done]))
    return failed


def main() -> None:
    """Execute the missing runs, and print and write the table; exits with 1 if a run failed."""
    parser = argparse.ArgumentParser(description="Compare the algorithms on the example.")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "algorithms")
    parser.add_argument("--base", type=Path, default=BASE, help="the policy to start from")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs, one core each")
    parser.add_argument("--extra", nargs="*", default=[], help="further options for all variants")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, stop_children)
    out = args.out.resolve()
    base = args.base.resolve()
    failed = run_all(plan(args.variants, args.seeds, out), args.jobs, base, args.extra)
    table = markdown(results(args.variants, args.seeds, out))
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(table)
    console.print(table, markup=False)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
