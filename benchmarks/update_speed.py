"""Measure what speeds up the update on a CPU: `python -m benchmarks.update_speed MODEL ROLLOUTS`.

Compares four variants: every trajectory computed separately with torch's attention (`apart`);
short sequences attended to by plain matrix products (`short`); in addition, what a group begins
with before its first sampled token computed once (`prompts`); and whatever its dialogues begin with
alike (`shared`).

One rank on the CPU, with the environment of a real run, updates MODEL on the trajectories in
ROLLOUTS (a run's `trainer.rollout_data_dir`), with one optimizer step per step of the run. The
variants alternate, so that other load affects all of them. Tokens per second count the tokens of
the dialogues, however many of them are computed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from verl import packing
from verl.batch import TokenBatch
from verl.config import Config
from verl.core_algos.kl import FixedKLController
from verl.data.trajectories import read_step, recorded_steps
from verl.ext.cpu_env import cpu_env
from verl.packing import PREFIXES, Packing
from verl.ports import free_port
from verl.preflight.undecided import fill_undecided
from verl.trainer.collect import Samples
from verl.trainer.learn import add_advantages, assemble, mini_batches
from verl.training import attention
from verl.training.worker import TrainerWorker

ROOT = Path(__file__).resolve().parents[1]
NEVER = sys.maxsize
VARIANTS = {
    "apart": (NEVER, 0), "short": (NEVER, attention.SHORT), "prompts": (NEVER, attention.SHORT),
    "shared": (packing.MIN_COMMON, attention.SHORT),
}  # fmt: skip
"""By name: tokens from which on more than prompts is shared, which `apart` and `short` are not, and
the maximum number of keys for plain products."""

console = Console(soft_wrap=True)


def build_config(model: Path, budget: int) -> Config:
    """Return the demo's options for updates on all trajectories in `budget`-token batches."""
    config = Config()
    section = config.actor_rollout_ref
    section.model.path, section.model.enable_gradient_checkpointing = str(model), False
    section.actor.ppo_max_token_len_per_gpu = budget
    section.actor.optim.lr = 3e-5
    config.algorithm.adv_estimator, config.algorithm.kl_ctrl.kl_coef = "grpo", 0.0
    config.trainer.n_gpus_per_node, config.trainer.device = 1, "cpu"
    return fill_undecided(config)


def read_samples(folder: Path) -> list[Samples]:
    """Read the trajectories of each recorded step, with their rewards."""
    steps = [read_step(folder, step) for step in recorded_steps(folder)]
    return [Samples([r.trajectory for r in rows], [r.reward for r in rows]) for rows in steps]


def batches(steps: list[Samples], config: Config) -> Iterator[TokenBatch]:
    """Yield one mini-batch per step, with all of its trajectories."""
    for samples in steps:
        batch = assemble(samples, config)
        add_advantages(batch, config, FixedKLController(0.0))
        yield from mini_batches(batch, config, len(batch), 1, 1)


def measure(
    model: Path, folder: Path, budget: int, rounds: int, variants: Sequence[str], steps: int | None
) -> None:
    """Measure every update with the variants alternating; prints one JSON line per update."""
    config = build_config(model, budget)
    worker = TrainerWorker(config, 0, 1, "127.0.0.1", free_port(), 1000)
    samples, prepared = read_samples(folder)[:steps], {}
    for variant in variants:
        is_shared = variant in ("prompts", "shared")
        config.trainer.share_prompts, packing.MIN_COMMON = is_shared, VARIANTS[variant][0]
        prepared[variant] = list(batches(samples, config))
        assert all((PREFIXES in batch.columns) is is_shared for batch in prepared[variant])
    for number in range(-1, rounds):  # The first round is the warm-up.
        for variant, updates in prepared.items():
            attention.SHORT = VARIANTS[variant][1]
            for batch in updates:
                began, began_cpu = time.perf_counter(), time.process_time()
                metrics = worker.actor.update(batch)
                row = {
                    "variant": variant,
                    "seconds": time.perf_counter() - began,
                    "cpu": time.process_time() - began_cpu,
                    "tokens": batch.num_tokens,
                    "computed": Packing.of(batch).num_tokens(range(len(batch))),
                    "micro": metrics["actor/num_micro_batches"],
                    "grad_norm": metrics["actor/grad_norm"],
                }
                if number >= 0:
                    console.print(json.dumps(row), highlight=False)
    worker.shutdown()


def report(rows: list[dict[str, Any]]) -> None:
    """Print each variant's tokens per second and per processor second, relative to the first."""
    rates: dict[str, list[float]] = {}
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    for variant in variants:
        updates = [row for row in rows if row["variant"] == variant]
        rates[variant] = [
            median(row["tokens"] / row[unit] for row in updates) for unit in ("seconds", "cpu")
        ]
        computed, tokens = (sum(row[name] for row in updates) for name in ("computed", "tokens"))
        ratios = [
            rate / base for rate, base in zip(rates[variant], rates[variants[0]], strict=True)
        ]
        console.print(
            f"{variant}: {rates[variant][0]:.0f} tokens/s ({ratios[0]:.3f} of {variants[0]}), "
            f"{rates[variant][1]:.0f} per processor second ({ratios[1]:.3f}); "
            f"median of {len(updates)} updates of {tokens / len(updates):.0f} tokens, "
            f"{computed / tokens:.3f} of them computed"
        )


def main() -> None:
    """Measure in a child process with the environment of a training rank, then report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, help="of the recorded ones; default: all")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        measure(args.model, args.rollouts, args.budget, args.rounds, args.variants, args.steps)
        return
    command = [sys.executable, "-m", "benchmarks.update_speed", *sys.argv[1:], "--inside"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **cpu_env()}, stdout=subprocess.PIPE, text=True,
        check=True,
    )  # fmt: skip
    report([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])


if __name__ == "__main__":
    main()
