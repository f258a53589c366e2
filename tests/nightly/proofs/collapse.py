"""Make runs collapse, and the guard notice: `python -m tests.nightly.proofs.collapse --out DIR`.

The tiny policy of `benchmarks.algorithms`, which first learns the example, is trained further in
six ways, each with several seeds and a validation after every step: as before (`healthy`), with 30
times the learning rate (`rate`), a reward of the wrong sign (`sign`), one for length alone
(`length`) and a loss on the documents too (`mask`), both with ten times the learning rate, and
trajectories of weights up to 16 versions old (`stale`, which needs two cores). The guard only
warns, so that the table also shows what it would have prevented. A run collapses if its validation
EM falls by a fifth; it is caught in time if the guard says so before. The proof passes if every
collapse is caught in time, and at most one healthy run in twenty is judged collapsed. A second call
goes on where the first ended. Another policy (`--base`, `--lr`, options) is trained as it is:

    python -m tests.nightly.proofs.collapse --out runs/collapse --base runs/demo/warm_start \\
        --lr 2e-5 data.max_start_length=160 data.max_prompt_length=384 trainer.compute_dtype=auto
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.algorithms.runner import BASE, RESULT, retriever, run_variant, stay_on
from benchmarks.algorithms.variants import GRPO, NO_MASK
from verl.config import GuardConfig
from verl.ext.guard import (
    DRIFT,
    LENGTH_CLIP,
    MALFORMED,
    NO_ANSWER,
    REPETITION,
    SHIFT,
    TURN_TOKENS,
    CollapseGuard,
)

FALL = 0.8
"""Share of the best validation EM so far, below which a run has collapsed."""
FACTORS = {"rate": 30, "length": 10, "mask": 10}
"""Multiples of the good learning rate, with which itself the last two harm nothing in 16 steps."""
FALSE_ALARMS = 1 / 20
HEALTHY = "healthy"
LR = "actor_rollout_ref.actor.optim.lr"
ROLLOUT = "actor_rollout_ref.rollout"
REWARD = f"reward_model.name={Path(__file__).with_name('wrong_rewards.py')}"
KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    HEALTHY: (),
    "rate": (),
    "sign": (f"{REWARD}:wrong_sign",),
    "length": (f"{REWARD}:longest", "algorithm.outcome_gate=false"),
    "mask": (NO_MASK,),
    "stale": (f"{ROLLOUT}.max_staleness=16", "trainer.rollout_gpus=1"),
})  # fmt: skip
COLUMNS = {
    "val/em": "EM", DRIFT: "drift", SHIFT: "shift", MALFORMED: "malformed", NO_ANSWER: "no answer",
    LENGTH_CLIP: "clipped", TURN_TOKENS: "tokens", REPETITION: "repeated",
    "actor/entropy": "entropy", "actor/grad_norm": "grad norm", "guard/health": "health",
}  # fmt: skip


@dataclass(frozen=True)
class Course:
    """Metrics that a run logged, step by step; step 0 is the validation before training."""

    kind: str
    seed: int
    rows: list[dict[str, float]]

    @property
    def caught(self) -> int | None:
        """The first step that today's rules call a collapse, from the metrics that were logged."""
        guard = CollapseGuard(GuardConfig(), Path("no checkpoints"))
        steps = (int(row["step"]) for row in self.rows[1:] if guard.observe(row).is_collapsed)
        return next(steps, None)

    @property
    def fallen(self) -> int | None:
        """The first step whose validation EM is a fifth below the best one so far."""
        best = 0.0
        for row in self.rows:
            best = max(best, row.get("val/em", 0.0))
            if row.get("val/em", best) < FALL * best:
                return int(row["step"])
        return None

    @property
    def is_caught_in_time(self) -> bool:
        """Whether the verdict, which a step gets before its validation, is no later than a fall."""
        return self.caught is not None and (self.fallen is None or self.caught <= self.fallen)

    @property
    def ems(self) -> list[float]:
        """The validation EMs."""
        return [row["val/em"] for row in self.rows if "val/em" in row]

    def table(self) -> Table:
        """Return a table with one line per step."""
        table = Table("step", *COLUMNS.values(), title=f"{self.kind}, seed {self.seed}")
        for row in self.rows:
            cells = (f"{row[name]:.3g}" if name in row else "" for name in COLUMNS)
            table.add_row(str(int(row["step"])), *cells)
        return table


def course(kind: str, seed: int, base: Path, args: argparse.Namespace, url: str) -> Course:
    """Train `base` further, unless that was done before; returns the logged metrics."""
    out = args.out.resolve() / f"{kind}-{seed}"
    lr = args.lr * FACTORS.get(kind, 1)
    options = [*GRPO, f"trainer.total_training_steps={args.steps}", "trainer.test_freq=1"]
    options += [f"{LR}={lr}", f"{ROLLOUT}.name=transformers", *KINDS[kind], *args.options]
    if not (out / RESULT).exists():
        run_variant(options, seed, out, url=url, base=base)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return Course(kind, seed, [json.loads(line) for line in lines])


def learned(args: argparse.Namespace, url: str) -> Path:
    """Return the policy to train further: `--base`, or the tiny one after eight steps."""
    if args.base is not None:
        return args.base.resolve()
    out = args.out.resolve() / "learned"
    if not (out / RESULT).exists():
        steps = ["trainer.total_training_steps=8", f"{LR}=2e-5"]
        run_variant([*GRPO, *steps, f"{ROLLOUT}.name=transformers"], 0, out, url=url, base=BASE)
    return out / "model"


def summary(courses: list[Course]) -> Table:
    """Return a table with one line per run."""
    table = Table("run", "seed", "EM first, best, last", "fallen at", "caught at", "in time")
    for c in courses:
        ems = f"{c.ems[0]:.3f}, {max(c.ems):.3f}, {c.ems[-1]:.3f}"
        in_time = "" if c.fallen is None and c.caught is None else str(c.is_caught_in_time)
        cells = ("" if step is None else str(step) for step in (c.fallen, c.caught))
        table.add_row(c.kind, str(c.seed), ems, *cells, in_time)
    return table


def main() -> int:
    """Run the proof; returns 0 if the guard behaved as it should."""
    args = _parser().parse_args()
    if args.core is not None:
        stay_on(args.core)
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    console = Console(width=140)
    runs = [(kind, seed) for seed in range(args.seeds) for kind in args.kinds]
    runs += [(HEALTHY, seed) for seed in range(args.seeds, args.healthy)]
    courses = []
    with retriever(args.url) as url:
        base = learned(args, url)
        for kind, seed in runs:
            courses.append(course(kind, seed, base, args, url))
            console.print(courses[-1].table())
    console.print(summary(courses))
    missed = [c for c in courses if c.fallen is not None and not c.is_caught_in_time]
    healthy = [c for c in courses if c.kind == HEALTHY]
    alarms = [c for c in healthy if c.caught is not None and c.fallen is None]
    console.print(f"collapses: {len(missed)} missed; healthy runs: {len(alarms)} of {len(healthy)}"
                  " judged collapsed")  # fmt: skip
    return int(bool(missed) or len(alarms) > max(1.0, FALSE_ALARMS * len(healthy)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Collapse runs and see the guard catch them.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("options", nargs="*", help="options of the trainer, key=value")
    parser.add_argument("--lr", type=float, default=2e-5, help="a good learning rate")
    parser.add_argument("--steps", type=int, default=16, help="training steps of each run")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind")
    parser.add_argument("--healthy", type=int, default=20, help="healthy runs in all")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--url", help="a running retriever's /retrieve; one is started if left out")
    parser.add_argument("--base", type=Path, help="the policy to start from")
    parser.add_argument("--core", type=int, help="run on this core only")
    return parser


if __name__ == "__main__":
    sys.exit(main())
