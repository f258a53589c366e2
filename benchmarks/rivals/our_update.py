"""Our update on recorded trajectories: one rank on the CPU as in a run, but without Ray.

The measured time includes the driver's part: the batch, its advantages and its mini-batch.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch

from benchmarks.rivals.tasks import MATRIX_RATE, TaskPipe
from benchmarks.rivals.work import split
from benchmarks.update_speed import batches, build_config
from verl.ext.speed import WorkCounter
from verl.ports import free_port
from verl.trainer.learn import drop_zero_advantages
from verl.training.worker import TrainerWorker

SIDE = 2048
"""Rows and columns of the matrices whose product measures the machine."""


def matrix_rate() -> dict[str, float]:
    """Measure a matrix product in bfloat16; returns FLOPs per elapsed and per processor second.

    The best of ten products counts.
    """
    left, right = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16) for _ in range(2))
    out, seconds, cpu = torch.empty_like(left), math.inf, math.inf
    for _ in range(10):
        began, began_cpu = time.perf_counter(), time.process_time()
        torch.mm(left, right, out=out)
        seconds = min(seconds, time.perf_counter() - began)
        cpu = min(cpu, time.process_time() - began_cpu)
    return {"seconds": 2 * SIDE**3 / seconds, "cpu": 2 * SIDE**3 / cpu}


def main() -> None:
    """Process tasks until there are no more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--questions", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--budget", type=int, required=True)
    args = parser.parse_args()
    pipe, config = TaskPipe(), build_config(args.model, args.budget)
    config.actor_rollout_ref.actor.optim.lr = args.lr
    config.actor_rollout_ref.actor.optim.weight_decay = 0.0
    work = split(args.rollouts, args.questions)
    worker = TrainerWorker(config, 0, 1, "127.0.0.1", free_port(), len(work))
    while True:
        number = pipe.wait()
        if number == MATRIX_RATE:
            pipe.answer(**matrix_rate())
            continue
        (batch,) = batches([work[number]], config)
        if pipe.mode:
            batch = drop_zero_advantages(batch)
        metrics = worker.actor.update(batch)
        pipe.stop()
        counter = WorkCounter(config)
        counter.add_update("update", counter.policy, batch)
        pipe.answer(
            grad_norm=metrics["actor/grad_norm"], flops=counter.take()["update"].model,
        )  # fmt: skip


if __name__ == "__main__":
    main()
