"""Compare the held-out EM of runs that train on older trajectories.

`python -m benchmarks.lag --seeds 0 --lags 0 1 4 16` trains the tiny policy with GRPO and the real
trainer (Ray, FSDP2, vLLM, HTTP). Step t trains on trajectories of which version max(1, t - lag) of
the weights sampled every token. `rollout.max_staleness` is only a bound, and a fast engine stays
far below it; therefore the lag is set by a generated schedule, which the run replays
(`rollout.replay`). Finished runs are not repeated. The figures are written to `lag.json`, the
curves to `lag.svg`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.algorithms.runner import BASE, ROOT, Result, retriever
from benchmarks.algorithms.variants import GROUP_SIZE, NUM_STEPS, NUM_TRAJECTORIES
from benchmarks.asynchrony import read_metrics, train
from verl.ext import replay

MAX_TURNS = 8
"""Turns of a schedule entry: more than a dialogue has. The trainer ignores the surplus."""
LOSS_OPTIONS = {
    "engine": (),
    "decoupled": (
        "actor_rollout_ref.actor.old_log_probs=recompute",
        "actor_rollout_ref.actor.rollout_is=token",
    ),
    "uncorrected": ("actor_rollout_ref.actor.old_log_probs=recompute",),
}
"""Options by the way in which the loss treats older tokens (docs/guides/rollouts.md)."""
console = Console(soft_wrap=True, highlight=False)


def write_schedule(folder: Path, lag: int, steps: int) -> Path:
    """Write a schedule in which every step takes trajectories of the weights `lag` versions ago.

    The first steps take those of version 1. Returns the schedule's folder.
    """
    for step in range(1, steps + 1):
        versions = (max(1, step - lag),) * MAX_TURNS
        replay.write(folder, step, (
            replay.ScheduleEntry(group=f"{step}/{position}", sample=sample,
                                   replica=0, versions=versions)
            for position in range(NUM_TRAJECTORIES // GROUP_SIZE)
            for sample in range(GROUP_SIZE)
        ))  # fmt: skip
    return folder / replay.FOLDER


@dataclass(frozen=True)
class LagRun:
    """Result of one run."""

    way: str
    """Key of LOSS_OPTIONS."""
    lag: int
    seed: int
    curve: list[tuple[int, float]]
    """(step, greedy EM over all held-out questions)."""
    ages: list[float]
    """Mean age of the tokens of each step, in weight versions."""
    clipped: float
    """Share of tokens whose ratio was clipped, averaged over the steps."""

    @property
    def mean_em(self) -> float:
        """Mean EM of all validations after the first step."""
        return fmean(em for step, em in self.curve if step)

    def first_step(self, min_em: float) -> float:
        """Return the step of the first validation with at least `min_em`, or infinity."""
        return next((step for step, em in self.curve if em >= min_em), math.inf)


def read_run(way: str, lag: int, seed: int, folder: Path) -> LagRun:
    """Read the result of a finished run from its folder."""
    steps = [row for row in read_metrics(folder) if "rollout/staleness/mean" in row]
    result = Result.read(folder)
    assert result is not None
    clipped = fmean(row.get("actor/clip_fraction", 0.0) for row in steps)
    ages = [row["rollout/staleness/mean"] for row in steps]
    return LagRun(way, lag, seed, result.curve, ages, clipped)


def table(runs: Sequence[LagRun]) -> str:
    """Return a Markdown table with a row per loss and lag, with means over the seeds."""
    groups: dict[tuple[str, int], list[LagRun]] = defaultdict(list)
    for run in runs:
        groups[run.way, run.lag].append(run)
    lines = ["| loss | lag | age of the last step | EM at the end | mean EM | steps to EM 0.9 | "
             "clipped |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for (way, lag), seeds in groups.items():
        age = fmean(run.ages[-1] for run in seeds)
        final_em = fmean(run.curve[-1][1] for run in seeds)
        mean_em = fmean(run.mean_em for run in seeds)
        steps = fmean(run.first_step(0.9) for run in seeds)
        reached = f"{steps:.0f}" if math.isfinite(steps) else "never"
        clipped = fmean(run.clipped for run in seeds)
        lines.append(f"| {way} | {lag} | {age:.1f} | {final_em:.3f} | {mean_em:.3f} | {reached} | "
                     f"{clipped:.4f} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def draw(runs: Sequence[LagRun], path: Path) -> None:
    """Draw the EM curves; the seeds of one loss and lag have the same colour."""
    curves = list(dict.fromkeys((run.way, run.lag) for run in runs))
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="held-out EM", ylim=(0, 1))
    for run in runs:
        number = curves.index((run.way, run.lag))
        label = f"lag {run.lag} ({run.way})" if run.seed == runs[0].seed else None
        axes.plot(*zip(*run.curve, strict=True), color=f"C{number}", label=label)
    axes.grid(alpha=0.3)
    axes.legend()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lag"}):
        figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.lag", description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 4, 16])
    parser.add_argument("--ways", nargs="+", choices=list(LOSS_OPTIONS), default=["engine"],
                        help="how the loss treats older tokens")  # fmt: skip
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--base", type=Path, default=BASE, help="the policy to start from")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "lag")
    args = parser.parse_args(arguments)
    out, base = args.out.resolve(), args.base.resolve()
    runs = []
    with retriever() as url:
        for seed, way, lag in itertools.product(args.seeds, args.ways, args.lags):
            folder = out / f"steps_{args.steps}" / way / f"lag_{lag}" / f"seed_{seed}"
            options = [*LOSS_OPTIONS[way], f"trainer.total_training_steps={args.steps}"]
            if lag:
                planned = write_schedule(folder / "planned", lag, args.steps)
                options.append(f"actor_rollout_ref.rollout.replay={planned}")
            train(folder, seed, url, lag, options, base)
            runs.append(read_run(way, lag, seed, folder))
            console.print(runs[-1])
            (out / "lag.json").write_text(json.dumps([vars(run) for run in runs]) + "\n")
            draw(runs, out / "lag.svg")
    console.print(table(runs), markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
