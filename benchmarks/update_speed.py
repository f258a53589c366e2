"""`python -m benchmarks.update_speed MODEL ROLLOUTS`: what makes the update on a CPU fast.

Three ways: each trajectory by itself with torch's attention (`apart`), with short runs attended to
by plain products (`short`), and with the prompts of groups computed once too (`shared`).

One rank on the CPU, with the environment that a run gives it, updates MODEL on the trajectories of
a run's `trainer.rollout_data_dir`, one optimizer step for each step of the run. Ways take turns, so
that what else the machine does meets all of them. Tokens are those of the dialogues, whatever is
computed of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from verl.config import Config
from verl.core_algos.kl import FixedKLController
from verl.data.trajectories import read_step, recorded_steps
from verl.packing import SHARED_PROMPT, Packing
from verl.ports import free_port
from verl.preflight.memory.check import fill_undecided
from verl.trainer.collection import Samples
from verl.trainer.groups import cpu_env
from verl.trainer.learning import add_advantages, assemble, mini_batches
from verl.training import attention
from verl.training.worker import TrainerWorker
from verl.types import TokenBatch

ROOT = Path(__file__).resolve().parents[1]
WAYS = {"apart": (False, 0), "short": (False, attention.SHORT), "shared": (True, attention.SHORT)}
"""Whether prompts are shared, and up to how many keys plain products are taken."""

console = Console(soft_wrap=True)


def options(model: Path, budget: int) -> Config:
    """The demo's, of an update in which every trajectory takes part."""
    config = Config()
    section = config.actor_rollout_ref
    section.model.path, section.model.enable_gradient_checkpointing = str(model), False
    section.actor.ppo_max_token_len_per_gpu = budget
    section.actor.optim.lr = 3e-5
    config.algorithm.adv_estimator, config.algorithm.kl_ctrl.kl_coef = "grpo", 0.0
    config.trainer.n_gpus_per_node, config.trainer.device = 1, "cpu"
    return fill_undecided(config)


def steps(folder: Path) -> list[Samples]:
    """The trajectories of each step, with their scores."""
    found = [read_step(folder, step) for step in recorded_steps(folder)]
    return [Samples([r.trajectory for r in rows], [r.reward for r in rows]) for rows in found]


def batches(samples: list[Samples], config: Config) -> Iterator[TokenBatch]:
    """The one mini-batch of each step."""
    for one in samples:
        batch = assemble(one, config)
        add_advantages(batch, config, FixedKLController(0.0))
        yield from mini_batches(batch, config, len(batch), 1, 1)


def measure(model: Path, folder: Path, budget: int, rounds: int) -> None:
    """Seconds of each update, the ways in turn; one JSON line for each."""
    config = options(model, budget)
    worker = TrainerWorker(config, 0, 1, "127.0.0.1", free_port(), 1000)
    samples, prepared = steps(folder), {}
    for way, (is_shared, _) in WAYS.items():
        config.trainer.share_prompts = is_shared
        prepared[way] = list(batches(samples, config))
        assert all((SHARED_PROMPT in batch.rows) is is_shared for batch in prepared[way])
    for number in range(-1, rounds):  # the first round warms up
        for way, minis in prepared.items():
            attention.SHORT = WAYS[way][1]
            for mini in minis:
                began, used = time.perf_counter(), time.process_time()
                metrics = worker.actor.update(mini)
                seconds, used = time.perf_counter() - began, time.process_time() - used
                computed = Packing.of(mini).num_tokens(range(len(mini)))
                facts = {"way": way, "seconds": seconds, "cpu": used, "tokens": mini.num_tokens,
                         "computed": computed, "micro": metrics["actor/num_micro_batches"],
                         "grad_norm": metrics["actor/grad_norm"]}  # fmt: skip
                if number >= 0:
                    console.print(json.dumps(facts), highlight=False)
    worker.shutdown()


def report(rows: list[dict[str, Any]]) -> None:
    """Tokens/s of each way, of the clock and of the processor, and what they are of the first's."""
    rates: dict[str, list[float]] = {}
    for way in WAYS:
        own = [row for row in rows if row["way"] == way]
        rates[way] = [
            median(row["tokens"] / row[unit] for row in own) for unit in ("seconds", "cpu")
        ]
        computed, tokens = (sum(row[name] for row in own) for name in ("computed", "tokens"))
        ratios = [one / first for one, first in zip(rates[way], rates["apart"], strict=True)]
        console.print(
            f"{way}: {rates[way][0]:.0f} tokens/s ({ratios[0]:.3f} of apart), "
            f"{rates[way][1]:.0f} per processor second ({ratios[1]:.3f}); median of {len(own)} "
            f"updates of {tokens / len(own):.0f} tokens, {computed / tokens:.3f} of them computed"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        measure(given.model, given.rollouts, given.budget, given.rounds)
        return
    command = [sys.executable, "-m", "benchmarks.update_speed", *sys.argv[1:], "--inside"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **cpu_env()}, stdout=subprocess.PIPE, text=True,
        check=True,
    )  # fmt: skip
    report([json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")])


if __name__ == "__main__":
    main()
