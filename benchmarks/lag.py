"""Held-out EM against the age of what a step learns from.

`python -m benchmarks.lag --seeds 0 --lags 0 1 4 16` trains the tiny policy by the real trainer
(Ray, FSDP2, vLLM, HTTP), GRPO, with each step t learning from what version max(1, t - lag) of the
weights sampled, every token of it. `rollout.max_staleness` is only a bound, and a fast engine stays
far below it; so the lag is set by a schedule that is made for it and repeated (`rollout.replay`).
A run that has its result is not repeated. `lag.json` has the figures, `lag.svg` the curves.
"""

from __future__ import annotations

import argparse
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

from benchmarks.algorithms.runner import BASE, ROOT, Result, prepare, retriever
from benchmarks.algorithms.variants import GROUP_SIZE, NUM_STEPS, NUM_TRAJECTORIES
from benchmarks.asynchrony import run
from verl.rollout import schedule

MOST_TURNS = 8
"""More than a dialogue has: what is not sampled is passed over."""
WAYS = {
    "engine": (),
    "decoupled": (
        "actor_rollout_ref.actor.old_log_probs=recompute",
        "actor_rollout_ref.actor.rollout_is=token",
    ),
    "uncorrected": ("actor_rollout_ref.actor.old_log_probs=recompute",),
}
"""What the loss makes of older tokens (docs/asynchrony.md)."""
console = Console(soft_wrap=True, highlight=False)


def write_schedule(folder: Path, lag: int, steps: int) -> Path:
    """A schedule by which every step has trajectories that are `lag` versions old, or as old as the
    run is; returns its folder."""
    for step in range(1, steps + 1):
        versions = (max(1, step - lag),) * MOST_TURNS
        schedule.write(folder, step, (
            schedule.ScheduleEntry(group=f"{step}/{position}", sample=sample, greedy=False,
                                   replica=0, versions=versions)
            for position in range(NUM_TRAJECTORIES // GROUP_SIZE)
            for sample in range(GROUP_SIZE)
        ))  # fmt: skip
    return folder / schedule.FOLDER


@dataclass(frozen=True)
class Course:
    """One run."""

    way: str
    lag: int
    seed: int
    curve: list[tuple[int, float]]
    """(step, greedy EM over all held-out questions)."""
    ages: list[float]
    """Mean age in versions of the tokens of each step."""
    clipped: float
    """Share of tokens whose ratio was cut, mean of steps."""

    @property
    def area(self) -> float:
        """Mean EM of all validations after the first step."""
        return fmean(em for step, em in self.curve if step)

    def reached(self, least: float) -> float:
        """The step whose validation was the first with that EM."""
        return next((step for step, em in self.curve if em >= least), math.inf)


def course_of(way: str, lag: int, seed: int, folder: Path) -> Course:
    """From the folder of a finished run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rollout/staleness/mean" in row]
    result = Result.read(folder)
    assert result is not None
    clipped = fmean(row.get("actor/clip_fraction", 0.0) for row in steps)
    ages = [row["rollout/staleness/mean"] for row in steps]
    return Course(way, lag, seed, result.curve, ages, clipped)


def table(courses: Sequence[Course]) -> str:
    """Markdown: a row for each way and lag, a mean over the seeds."""
    groups: dict[tuple[str, int], list[Course]] = defaultdict(list)
    for one in courses:
        groups[one.way, one.lag].append(one)
    lines = ["| loss | lag | age of the last step | EM at the end | mean EM | steps to EM 0.9 | "
             "clipped |", "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for (way, lag), found in groups.items():
        figures = [
            fmean(one.ages[-1] for one in found), fmean(one.curve[-1][1] for one in found),
            fmean(one.area for one in found), fmean(one.reached(0.9) for one in found),
            fmean(one.clipped for one in found),
        ]  # fmt: skip
        age, last, area, steps, clipped = figures
        reached = f"{steps:.0f}" if math.isfinite(steps) else "never"
        lines.append(f"| {way} | {lag} | {age:.1f} | {last:.3f} | {area:.3f} | {reached} | "
                     f"{clipped:.4f} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def draw(courses: Sequence[Course], path: Path) -> None:
    """The curves; those of several seeds have one colour."""
    names = list(dict.fromkeys((one.way, one.lag) for one in courses))
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="held-out EM", ylim=(0, 1))
    for one in courses:
        number = names.index((one.way, one.lag))
        label = f"lag {one.lag} ({one.way})" if one.seed == courses[0].seed else None
        axes.plot(*zip(*one.curve, strict=True), color=f"C{number}", label=label)
    axes.grid(alpha=0.3)
    axes.legend()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lag"}):
        figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.lag", description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 4, 16])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["engine"])
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--base", type=Path, default=BASE, help="the policy to start from")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "lag")
    given = parser.parse_args(arguments)
    out, base = given.out.resolve(), prepare(given.base.resolve())
    courses = []
    with retriever() as url:
        for seed, way, lag in ((s, w, k) for s in given.seeds for w in given.ways
                               for k in given.lags):  # fmt: skip
            folder = out / f"steps_{given.steps}" / way / f"lag_{lag}" / f"seed_{seed}"
            options = [*WAYS[way], f"trainer.total_training_steps={given.steps}"]
            if lag:
                planned = write_schedule(folder / "planned", lag, given.steps)
                options.append(f"actor_rollout_ref.rollout.replay={planned}")
            run(folder, seed, url, lag, options, base)
            courses.append(course_of(way, lag, seed, folder))
            console.print(courses[-1])
            (out / "lag.json").write_text(json.dumps([vars(one) for one in courses]) + "\n")
            draw(courses, out / "lag.svg")
    console.print(table(courses), markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
