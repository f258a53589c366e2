"""The driver's state comes back as it was, from older checkpoints too."""

import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from verl.checkpoint.folders import RunState, read_driver_random, write_driver_random, write_state


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_random_states_of_the_driver_come_back(tmp_path: Path) -> None:
    """Python, NumPy and torch draw again what they drew after the save."""
    write_driver_random(tmp_path)
    drawn = draw()
    assert draw() != drawn
    read_driver_random(tmp_path)
    assert draw() == drawn


def test_a_state_goes_through_json(tmp_path: Path) -> None:
    """Every part of it, with the run's identity beside."""
    state = RunState(
        3, {"epoch": 1}, 0.5, {"stage": 2}, {"healthy": 1}, {"value": 0.25, "step": 2}, 0.125,
        {"loss": 1.5},
    )  # fmt: skip
    step_dir = tmp_path / "global_step_3"
    step_dir.mkdir()
    write_state(step_dir, {**asdict(state), "fingerprints": {"data": "x"}})
    assert RunState.read(step_dir) == state


def test_an_older_state_is_read(tmp_path: Path) -> None:
    """Checkpoints from before the guard and the best metric have less."""
    step_dir = tmp_path / "global_step_2"
    step_dir.mkdir()
    write_state(step_dir, {"step": 2, "sampler": {}, "kl_coef": 0.1})
    state = RunState.read(step_dir)
    assert (state.step, state.guard, state.best, state.pending) == (2, None, None, None)
