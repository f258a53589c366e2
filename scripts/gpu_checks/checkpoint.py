"""Checks that a checkpoint written in the background is resumed bit for bit."""

import asyncio
import os
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_checks.report import Report
from scripts.gpu_checks.trainer import KINDS, LENGTHS, OFFLOADS, training_rank, weights
from scripts.gpu_checks.world import random_batch, small_run, write_model
from verl.config import Config
from verl.preflight.undecided import with_options
from verl.training.devices import DETERMINISTIC_ENV
from verl.training.worker import TrainerWorker


def check(report: Report) -> None:
    """Check PPO in float32 with deterministic kernels, with state on the device and on the host."""
    os.environ |= DETERMINISTIC_ENV
    model = write_model(report.folder / "model", "tiny")
    for offload in ("none", "all"):
        changes = KINDS["ppo"] | OFFLOADS[offload] | {"trainer.deterministic": True}
        with report.part(offload):
            compare(report, offload, with_options(small_run(model, report.device), changes))


def compare(report: Report, name: str, config: Config) -> None:
    """Compare a run that continues with one that is resumed; resuming twice shows the noise."""
    folder = report.folder / f"saved-{name}"
    continued = first_run(config, folder)
    resumed_runs = [resumed(config, folder) for _ in range(2)]
    report.expect(f"{name}_repeatable", same(*resumed_runs), equal=True)
    report.expect(f"{name}_resumed", same(continued, resumed_runs[0]), equal=True)


def first_run(config: Config, folder: Path) -> tuple[list[dict[str, float]], torch.Tensor]:
    """Make two updates, start a checkpoint, and make a third update while it is written."""
    with training_rank(config) as worker:
        for seed in range(2):
            update(worker, seed)
        worker.start_checkpoint(folder)
        metrics = update(worker, 7)
        problem = asyncio.run(worker.finish_checkpoint())
        assert not problem, problem
        return metrics, weights(worker)


def resumed(config: Config, folder: Path) -> tuple[list[dict[str, float]], torch.Tensor]:
    """Load the checkpoint in a new run and make the same third update."""
    with training_rank(with_options(config, {"trainer.seed": 5})) as worker:
        worker.load_checkpoint(folder)
        return update(worker, 7), weights(worker)


def update(worker: TrainerWorker, seed: int) -> list[dict[str, float]]:
    """Update actor and critic once; returns their metrics."""
    batch = random_batch(LENGTHS, seed=seed)
    assert worker.critic is not None
    return [worker.actor.update(batch), worker.critic.update(batch)]


def same(a: tuple[Any, torch.Tensor], b: tuple[Any, torch.Tensor]) -> bool:
    """Return whether metrics and weights are equal, bit for bit."""
    return a[0] == b[0] and torch.equal(a[1], b[1])
