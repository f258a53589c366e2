"""The driver's part of a checkpoint: where the run stood between two steps, and random states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import TypeAdapter

from verl.checkpoint.folders import STATE_FILE, read_state, step_of
from verl.training.shards import random_states, set_random_states
from verl.training.stored import read_states, reading

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
    ahead: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """Prompts that were drawn, and perhaps being sampled, for later steps."""
    version: int | None = None
    """Of the weights that engines were given after the step."""

    @classmethod
    def read(cls, step_dir: Path) -> Self:
        """A checkpoint's, which may hold more, and less if it is an old one. Raises ModelError."""
        with reading(step_dir / STATE_FILE):
            state = TypeAdapter(cls).validate_python(read_state(step_dir))
            if state.step != step_of(step_dir) or not math.isfinite(state.kl_coef):
                raise ValueError(f"it says step {state.step}, KL coefficient {state.kl_coef}")
            return state


def write_driver_random(step_dir: Path) -> None:
    """Keep the driver's random states."""
    (step_dir / DRIVER_FILE).parent.mkdir(exist_ok=True)
    torch.save(random_states(), step_dir / DRIVER_FILE)


def read_driver_random(step_dir: Path) -> None:
    """Bring the driver's random states back, where the checkpoint has them. Raises ModelError."""
    path = step_dir / DRIVER_FILE
    if path.exists():
        with reading(path):
            set_random_states(read_states(path))
