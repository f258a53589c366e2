"""Our update of given trajectories: one rank on the CPU, as a run has it, without Ray around it.

The clocks run over the driver's share too: the batch, its advantages and its mini-batch.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch

from benchmarks.rivals.turns import Turns
from benchmarks.rivals.work import split
from benchmarks.update_speed import batches, options
from verl.monitor.performance import WorkCounter
from verl.ports import free_port
from verl.trainer.learning import drop_zero_advantages
from verl.training.worker import TrainerWorker

RATE = -1
"""Number of the work that is no update but a measure of the machine."""
SIDE = 2048
"""Rows and columns of the matrices that are multiplied for it."""


def matrix_rate() -> dict[str, float]:
    """FLOP/s of a product of square matrices in bfloat16, by both clocks: the best of ten."""
    one, two = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16) for _ in range(2))
    out, seconds, cpu = torch.empty_like(one), math.inf, math.inf
    for _ in range(10):
        began = (time.perf_counter(), time.process_time())
        torch.mm(one, two, out=out)
        seconds = min(seconds, time.perf_counter() - began[0])
        cpu = min(cpu, time.process_time() - began[1])
    return {"seconds": 2 * SIDE**3 / seconds, "cpu": 2 * SIDE**3 / cpu}


def main() -> None:
    """Take turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--questions", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--budget", type=int, required=True)
    given = parser.parse_args()
    turns, config = Turns(), options(given.model, given.budget)
    config.actor_rollout_ref.actor.optim.lr = given.lr
    config.actor_rollout_ref.actor.optim.weight_decay = 0.0
    work = split(given.rollouts, given.questions)
    worker = TrainerWorker(config, 0, 1, "127.0.0.1", free_port(), len(work))
    while True:
        number = turns.wait()
        if number == RATE:
            turns.answer(**matrix_rate())
            continue
        (batch,) = batches([work[number]], config)
        if turns.way:
            batch = drop_zero_advantages(batch)
        metrics = worker.actor.update(batch)
        turns.stop()
        counter = WorkCounter(config)
        counter.add_update("update", counter.policy, batch)
        turns.answer(
            grad_norm=metrics["actor/grad_norm"], flops=counter.take()["update"].model,
        )  # fmt: skip


if __name__ == "__main__":
    main()
