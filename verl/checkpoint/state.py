"""The driver's part of a checkpoint: where the run stood between two steps, and random states."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from verl.training.shards import random_states, set_random_states

DRIVER_FILE = "ranks/driver.pt"


@dataclass(frozen=True)
class RunState:
    """Where a run stood after a finished step; JSON throughout."""

    step: int
    sampler: Mapping[str, Any]
    """The data position."""
    kl_coef: float
    reward: Mapping[str, Any] = field(default_factory=dict)
    guard: Mapping[str, Any] | None = None
    best: Mapping[str, Any] | None = None
    """`metric`, `value` and `step` of the best validation so far."""
    score: float | None = None
    """The best metric's value at this very step, where it was validated."""
    pending: Mapping[str, float] | None = None
    """Metrics of a step that was learned from but not yet validated and logged."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
        """From a checkpoint's state, which may hold more, and less if it is an old one."""
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in state.items() if name in names})


def write_driver_random(step_dir: Path) -> None:
    """Keep the driver's random states."""
    (step_dir / DRIVER_FILE).parent.mkdir(exist_ok=True)
    torch.save(random_states(), step_dir / DRIVER_FILE)


def read_driver_random(step_dir: Path) -> None:
    """Bring the driver's random states back, where the checkpoint has them."""
    if (step_dir / DRIVER_FILE).exists():
        set_random_states(torch.load(step_dir / DRIVER_FILE, weights_only=False))
