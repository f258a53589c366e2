"""Learning rates that change within a run: a scaled rate, and a resumed schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from verl.config import OptimConfig
from verl.training.fsdp import FsdpModel, FsdpOptions, StepResult

pytestmark = pytest.mark.usefixtures("single_rank")


def make_model(lr: float, **given: Any) -> FsdpModel:
    """Build a model of one weight with four updates of warm-up out of ten."""
    optim = OptimConfig(lr=lr, lr_warmup_steps_ratio=0.4, weight_decay=0.0)
    options = FsdpOptions(torch.float32, num_updates=10, optim=optim, **given)
    return FsdpModel(nn.Linear(1, 1, bias=False), [], torch.device("cpu"), options)


def step(model: FsdpModel) -> StepResult:
    model.backward(model.module(torch.ones(1, 1)).sum())
    return model.step()


def weight(model: FsdpModel) -> float:
    return model.full_trained_parameters()["weight"].item()


def test_a_warm_up_rises_to_the_peak_then_the_rate_decays() -> None:
    """The first update already learns; the decay goes by the share of the other updates."""
    model = make_model(lr=0.1, decay=lambda done: 1.0 - done)
    rates = [step(model).lr for _ in range(12)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[4:] == pytest.approx([0.1 * left / 6 for left in (6, 5, 4, 3, 2, 1, 0, 0)])


def test_a_resumed_schedule_has_the_rates_of_this_run() -> None:
    """A run resumed with a lower rate uses it, at the schedule's position."""
    model = make_model(lr=0.1)
    assert model.optimizer is not None
    model.optimizer.num_updates_done = 3
    assert [step(model).lr for _ in range(2)] == pytest.approx([0.1, 0.1])
    model.optimizer.num_updates_done = 1
    assert step(model).lr == pytest.approx(0.05)
