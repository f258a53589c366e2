"""Learning rates that change in mid-run: a lowered one, and a checkpoint's schedule taken up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from verl.config import OptimConfig
from verl.training.fsdp import FsdpModel, FsdpOptions, StepResult

pytestmark = pytest.mark.usefixtures("single_rank")


def engine(lr: float) -> FsdpModel:
    """One weight, warmed up over four of ten updates."""
    optim = OptimConfig(lr=lr, lr_warmup_steps_ratio=0.4, weight_decay=0.0)
    options = FsdpOptions(torch.float32, num_updates=10, optim=optim)
    return FsdpModel(nn.Linear(1, 1, bias=False), [], torch.device("cpu"), options)


def step(built: FsdpModel) -> StepResult:
    built.backward(built.module(torch.ones(1, 1)).sum())
    return built.step()


def weight(built: FsdpModel) -> float:
    return built.full_trained_parameters()["weight"].item()


def test_a_scaled_rate_goes_on_with_the_schedule() -> None:
    """A third of the rate in the middle of the warm-up is a third of it ever after."""
    built = engine(lr=0.8)
    assert [step(built).lr for _ in range(2)] == pytest.approx([0.2, 0.4])
    built.lr_scale = 0.25
    assert [step(built).lr for _ in range(3)] == pytest.approx([0.15, 0.2, 0.2])
    built.lr_scale = 1.0
    assert step(built).lr == pytest.approx(0.8)


def test_the_scaled_rate_is_what_the_optimizer_uses() -> None:
    """Adam's first step is its rate long, whatever the gradient."""
    built = engine(lr=0.8)
    built.lr_scale = 0.25
    before = weight(built)
    step(built)
    assert before - weight(built) == pytest.approx(0.05, rel=1e-4)


def test_a_schedule_is_taken_up_at_the_rates_of_this_run() -> None:
    """A run resumed with a lower rate learns with it, where the schedule had been."""
    built = engine(lr=0.1)
    built.num_updates_done = 3
    assert [step(built).lr for _ in range(2)] == pytest.approx([0.1, 0.1])
    built.num_updates_done = 1
    assert step(built).lr == pytest.approx(0.05)
