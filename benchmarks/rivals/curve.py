"""Learning curves of our trainer and TRL's: `python -m benchmarks.rivals.curve --trl-python PATH`.

Both sides train the same policy on the same questions in the same order, with the same dialogues,
reward, loss and optimizer, and are measured on the held-out questions by the same greedy dialogues.
They differ in everything that computes: our run has Ray, an engine, FSDP2 and shared prompts; TRL
samples with its model's `generate` and pads. One seed after another, ours first. An interrupted
benchmark goes on from the last checkpoint of each run. Writes `curve.svg` and `table.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.algorithms.runner import BASE, ROOT, retriever
from benchmarks.algorithms.table import mean_and_range
from benchmarks.algorithms.variants import COMMON, GRPO, NUM_TRAJECTORIES
from benchmarks.rivals.clock import CPU, LOAD
from example.geography import DATA

OURS, TRL = "ours", "TRL"
SIDES = (OURS, TRL)
HOOK = ROOT / "benchmarks" / "rivals" / "clock.py"
console = Console(soft_wrap=True, highlight=False)


@dataclass(frozen=True)
class Curve:
    """One side's run with one seed."""

    side: str
    seed: int
    em: Mapping[int, float]
    """Greedy EM of the held-out questions by step."""
    wall: Sequence[float]
    """Seconds of steps 1, 2, …: sampling and update, without validations and checkpoints."""
    cpu: Sequence[float]
    """Processor seconds of the same."""
    load: Sequence[float]
    """The machine's load average at the end of each step."""

    def spent(self, seconds: Sequence[float]) -> list[float]:
        """Return the sum of `seconds` up to each validated step."""
        sums = [0.0, *accumulate(seconds)]
        return [sums[step] for step in self.em]


def read_rows(path: Path) -> list[dict[str, float]]:
    """Return the last row of each step: a run that goes on repeats those after its checkpoint."""
    if not path.exists():
        return []
    rows = map(json.loads, path.read_text().splitlines())
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]


def read_curve(side: str, seed: int, folder: Path) -> Curve:
    """Read what the run in `folder` has written so far."""
    if side == OURS:
        names = {"em": "val/em", "wall": "timing_s/step", "cpu": CPU, "load": LOAD}
        rows = read_rows(folder / "metrics.jsonl")
        rows = [{k: r[n] for k, n in names.items() if n in r} | {"step": r["step"]} for r in rows]
    else:
        rows = read_rows(folder / "curve.jsonl")
    em = {int(row["step"]): row["em"] for row in rows if "em" in row}
    wall, cpu, load = ([row[k] for row in rows if row["step"]] for k in ("wall", "cpu", "load"))
    return Curve(side, seed, em, wall, cpu, load)


def shared_options(args: argparse.Namespace, seed: int, url: str, folder: Path) -> list[str]:
    """Return the options of our trainer from which TRL's are derived."""
    return [
        f"actor_rollout_ref.model.path={args.policy}", f"data.train_files={args.train_files}",
        f"data.val_files={args.val_files}", f"retriever.url={url}", *COMMON, *GRPO,
        f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_TRAJECTORIES}",
        f"actor_rollout_ref.actor.optim.lr={args.lr}",
        "actor_rollout_ref.actor.optim.weight_decay=0",
        f"actor_rollout_ref.rollout.name={args.engine}", f"trainer.seed={seed}",
        f"trainer.total_training_steps={args.steps}", f"trainer.test_freq={args.test_freq}",
        f"trainer.default_local_dir={folder}", *args.options,
    ]  # fmt: skip


def command(args: argparse.Namespace, side: str, options: list[str], folder: Path) -> list[str]:
    """Return the command that makes one run, or continues it."""
    if side == OURS:
        more = [f"trainer.save_freq={args.test_freq}", "trainer.keep_last=1", "trainer.keep_best=0",
                "trainer.resume_mode=auto", f"trainer.hooks=[{HOOK}:Clock]"]  # fmt: skip
        return [sys.executable, "-m", "verl.trainer.main_ppo", *options, *more]
    work = folder / "work.json"
    work.write_text(json.dumps({
        "options": options, "out": str(folder), "steps": args.steps, "test_freq": args.test_freq,
        "micro": args.micro, "threads": len(os.sched_getaffinity(0)),
    }))  # fmt: skip
    return [args.trl_python, "-m", "benchmarks.rivals.trl_curve", str(work)]


def run(args: argparse.Namespace, side: str, seed: int, url: str) -> Curve:
    """Make one run, unless it is finished; returns its curve. Exits if it fails."""
    folder = args.out / side / f"seed_{seed}"
    if args.steps not in read_curve(side, seed, folder).em:
        folder.mkdir(parents=True, exist_ok=True)
        threads = str(len(os.sched_getaffinity(0)))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads}
        options = shared_options(args, seed, url, folder)
        with (folder / "log").open("ab") as log:
            done = subprocess.run(
                command(args, side, options, folder), cwd=ROOT, env=environment,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        if done.returncode:
            sys.exit(f"{side}, seed {seed}: status {done.returncode}, see {folder / 'log'}")
    curve = read_curve(side, seed, folder)
    seconds = f"{sum(curve.cpu):.0f} processor s, {sum(curve.wall):.0f} s"
    console.print(f"{side} {seed}: {curve.em}, {seconds}, load {fmean(curve.load):.1f}")
    return curve


def bands(curves: Sequence[Curve]) -> dict[int, dict[str, tuple[float, float]]]:
    """Return lowest and highest EM over the seeds, by step and side, where all were validated."""
    steps = [step for step in curves[0].em if all(step in curve.em for curve in curves)]
    return {
        step: {
            side: (min(values), max(values))
            for side in SIDES
            if (values := [curve.em[step] for curve in curves if curve.side == side])
        }
        for step in steps
    }  # fmt: skip


def apart(band: Mapping[str, tuple[float, float]]) -> float:
    """Return the EM between the two sides' bands; 0 if they overlap."""
    return max(0.0, max(low for low, _ in band.values()) - min(high for _, high in band.values()))


def table(curves: Sequence[Curve]) -> str:
    """Return Markdown tables: EM by step with the bands' distance, and seconds per step."""
    lines = ["| step | " + " | ".join(SIDES) + " | bands apart |", "| ---: | --- | --- | ---: |"]
    for step, band in bands(curves).items():
        cells = [
            mean_and_range([curve.em[step] for curve in curves if curve.side == side], 3)
            for side in SIDES
        ]
        lines.append(f"| {step} | {' | '.join(cells)} | {apart(band):.3f} |")
    lines += ["", "| | processor s per step | s per step | load |", "| --- | --- | --- | --- |"]
    for side in SIDES:
        own = [curve for curve in curves if curve.side == side]
        cells = [mean_and_range([fmean(getattr(c, name)) for c in own], digits)
                 for name, digits in (("cpu", 2), ("wall", 1), ("load", 0))]  # fmt: skip
        lines.append(f"| {side} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw EM by step, by wall seconds and by processor seconds; a line per seed, a colour a side.

    The first panel has the bands of the seeds as well.
    """
    figure = Figure(figsize=(10, 3.3), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, label in zip(panels, ("step", "seconds", "processor seconds"), strict=True):
        axes.set(xlabel=label, ylim=(0, 1))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out EM, greedy")
    by_step = bands(curves)
    for number, side in enumerate(SIDES):
        own = [curve for curve in curves if curve.side == side]
        lows, highs = zip(*(band[side] for band in by_step.values()), strict=True)
        panels[0].fill_between(list(by_step), lows, highs, color=f"C{number}", alpha=0.2)
        for curve in own:
            places = list(curve.em), curve.spent(curve.wall), curve.spent(curve.cpu)
            for axes, place in zip(panels, places, strict=True):
                label = side if curve is own[0] else None
                axes.plot(place, list(curve.em.values()), f"C{number}", lw=1, label=label)
    panels[0].legend(loc="lower right")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "curve"}):
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Make the missing runs, then write the picture and the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", required=True, help="an interpreter that has TRL")
    parser.add_argument("--policy", type=Path, default=BASE, help="the policy to start from")
    parser.add_argument("--train-files", type=Path, default=DATA / "train.parquet")
    parser.add_argument("--val-files", type=Path, default=DATA / "val.parquet")
    parser.add_argument("--url", help="a running retriever's /retrieve; one is started if left out")
    parser.add_argument("--engine", default="transformers", help="engine of our rollouts")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--test-freq", type=int, default=5, help="steps between validations")
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--micro", type=int, default=NUM_TRAJECTORIES,
                        help="trajectories of TRL's micro-batches")  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks" / "curve")
    parser.add_argument("options", nargs="*", help="further options of both sides, key=value")
    args = parser.parse_args()
    for name in ("policy", "train_files", "val_files", "out"):
        setattr(args, name, getattr(args, name).resolve())
    with retriever(args.url) as url:
        curves = [run(args, side, seed, url) for seed in args.seeds for side in SIDES]
    draw(curves, args.out / "curve.svg")
    (args.out / "table.md").write_text(table(curves))
    console.print(table(curves), markup=False)


if __name__ == "__main__":
    main()
