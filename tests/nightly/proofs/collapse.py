"""Make a run collapse, and the guard notice: `python -m tests.nightly.proofs.collapse --out DIR`.

A policy is trained with GRPO twice, with a good learning rate and with a multiple of it, and
validated after every step. The guard only warns, so that the table also shows what it would have
prevented. The proof passes if the healthy run gets no verdict of collapse, and the other run gets
one while every validation so far is above three quarters of the best.

The policy is the tiny one of `benchmarks.algorithms`, or another (`--base`, `--lr`, options):

    python -m tests.nightly.proofs.collapse --out runs/collapse --base runs/demo/warm_start \\
        --lr 2e-5 data.max_start_length=160 data.max_prompt_length=384 trainer.compute_dtype=auto
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.algorithms.runner import BASE, retriever, run_variant, stay_on
from benchmarks.algorithms.variants import GRPO, POLICY_LR
from verl.ext.guard import DRIFT, MALFORMED, NO_ANSWER, SHIFT

COLLAPSED = 2.0
"""Value of `guard/health` for a collapse."""
MIN_EM = 0.1
"""Validation EM below which the initial policy has nothing to lose."""
SHARE = 0.75
"""Share of the best validation EM so far, below which a collapse was caught too late."""
COLUMNS = {
    "val/em": "EM", DRIFT: "drift", SHIFT: "shift", MALFORMED: "malformed", NO_ANSWER: "no answer",
    "actor/entropy": "entropy", "actor/grad_norm": "grad norm", "actor/lr": "lr",
    "guard/health": "health",
}  # fmt: skip


@dataclass(frozen=True)
class Course:
    """Metrics that a run logged, step by step; step 0 is the validation before training."""

    name: str
    rows: list[dict[str, float]]

    @property
    def caught(self) -> int | None:
        """The first step with a verdict of collapse."""
        steps = (int(row["step"]) for row in self.rows if row.get("guard/health") == COLLAPSED)
        return next(steps, None)

    def em(self, before: int) -> list[float]:
        """Return the validation EM at the steps before `before`."""
        return [row["val/em"] for row in self.rows if row["step"] < before and "val/em" in row]

    @property
    def is_caught_in_time(self) -> bool:
        """Whether every validation before the verdict is near the best one so far."""
        if self.caught is None:
            return False
        ems = self.em(self.caught)
        return ems[0] >= MIN_EM and all(em >= SHARE * max(ems[: i + 1]) for i, em in enumerate(ems))

    def table(self) -> Table:
        """Return a table with one line per step."""
        table = Table("step", *COLUMNS.values(), title=self.name)
        for row in self.rows:
            cells = (f"{row[name]:.3g}" if name in row else "" for name in COLUMNS)
            table.add_row(str(int(row["step"])), *cells)
        return table


def course(name: str, options: list[str], args: argparse.Namespace, url: str) -> Course:
    """Train with `options` on top of the benchmark's GRPO; returns the logged metrics."""
    out = args.out.resolve() / name
    common = [*GRPO, f"trainer.total_training_steps={args.steps}", "trainer.test_freq=1"]
    options = [*common, *options, *args.options]
    run_variant(options, args.seed, out, url=url, base=args.base.resolve())
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return Course(name, [json.loads(line) for line in lines])


def main() -> int:
    """Run the proof; returns 0 if the guard behaved as it should."""
    args = _parser().parse_args()
    if args.core is not None:
        stay_on(args.core)
    logging.basicConfig(level=logging.WARNING)
    optim = "actor_rollout_ref.actor.optim"
    good, bad = (f"{optim}.lr={args.lr * factor}" for factor in (1.0, args.factor))
    warm = f"{optim}.lr_warmup_steps_ratio={args.warmup}"
    console = Console(width=120)
    with retriever(args.url) as url:
        healthy = course("healthy", [good, warm], args, url)
        console.print(healthy.table())
        collapsed = course("collapsed", [bad, warm], args, url)
        console.print(collapsed.table())
    console.print(f"healthy run judged collapsed at step: {healthy.caught}")
    console.print(f"learning rate x {args.factor:g} judged collapsed at step: {collapsed.caught}")
    console.print(f"before its EM had fallen by a quarter: {collapsed.is_caught_in_time}")
    return 0 if healthy.caught is None and collapsed.is_caught_in_time else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Collapse a run and see the guard catch it.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("options", nargs="*", help="options of the trainer, key=value")
    parser.add_argument("--lr", type=float, default=POLICY_LR, help="a good learning rate")
    parser.add_argument("--factor", type=float, default=100.0, help="multiple of the learning rate")
    parser.add_argument("--warmup", type=float, default=0.0, help="lr_warmup_steps_ratio")
    parser.add_argument("--steps", type=int, default=8, help="training steps of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="a running retriever's /retrieve; one is started if left out")
    parser.add_argument("--base", type=Path, default=BASE, help="the policy to start from")
    parser.add_argument("--core", type=int, help="run on this core only")
    return parser


if __name__ == "__main__":
    sys.exit(main())
