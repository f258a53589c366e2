"""Check whether processes compute the same update bit for bit: `python -m benchmarks.updates`.

Each process, one rank on the CPU, makes three optimizer steps of the tiny policy on random
dialogues and repeats this several times. Half of the processes use the deterministic settings.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from scripts.gpu_checks.world import random_batch
from verl.config import ActorConfig, OptimConfig
from verl.training.actor import Actor
from verl.training.budgets import TokenBudgets
from verl.training.devices import DETERMINISTIC_ENV, make_deterministic
from verl.training.fsdp import FsdpModel, FsdpOptions
from verl.training.loading import load_causal_lm
from verl.training.models import LogProbModel, blocks

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "example" / "policy"
LENGTHS = [60 + 3 * number for number in range(24)]
NUM_UPDATES = 3

console = Console(soft_wrap=True)


def update(model: Path) -> str:
    """Make the updates; returns a digest of the final weights and of all metrics."""
    lm = load_causal_lm(str(model), torch.float32)
    options = FsdpOptions(torch.float32, num_updates=NUM_UPDATES, optim=OptimConfig(lr=1e-4))
    engine = FsdpModel(LogProbModel(lm), blocks(lm, lm), torch.device("cpu"), options)
    actor = Actor(engine, ActorConfig(), TokenBudgets(2048, 4096))
    batch = random_batch(LENGTHS, lm.config.vocab_size)
    metrics = [actor.update(batch) for _ in range(NUM_UPDATES)]
    digest = hashlib.sha256(repr(metrics).encode())
    for name, tensor in engine.full_trained_parameters().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


def run_updates(model: Path, times: int, deterministic: bool) -> None:
    """Make the updates `times` times in this process; prints the digest and seconds of each."""
    if deterministic:
        make_deterministic()
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    for _ in range(times):
        began = time.perf_counter()
        digest = update(model)
        console.print(f"{digest} {time.perf_counter() - began:.2f} s", highlight=False)
    dist.destroy_process_group()


def main() -> None:
    """Run all processes and count the different digests."""
    parser = argparse.ArgumentParser(description="The same update in several processes.")
    parser.add_argument("--model", type=Path, default=BASE)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--inside", choices=("usual", "deterministic"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside is not None:
        run_updates(args.model, args.times, args.inside == "deterministic")
        return
    digests = []
    for number in range(args.processes):
        kind = ("usual", "deterministic")[number % 2]
        command = [sys.executable, "-m", "benchmarks.updates", "--model", str(args.model)]
        command += ["--times", str(args.times), "--inside", kind]
        environment = {**os.environ, **(DETERMINISTIC_ENV if kind == "deterministic" else {})}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        console.print(f"{kind}:\n{done.stdout}", end="", highlight=False)
        digests += [line.split()[0] for line in done.stdout.splitlines()]
    console.print(f"{len(digests)} times, {len(set(digests))} different outcome(s)")


if __name__ == "__main__":
    main()
