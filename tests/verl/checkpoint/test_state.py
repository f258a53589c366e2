"""The driver's state comes back as it was, from older checkpoints too."""

import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from verl.checkpoint.folders import read_state, write_state
from verl.checkpoint.state import RunState, read_driver_random, write_driver_random


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
    write_state(tmp_path, {**asdict(state), "fingerprints": {"data": "x"}})
    assert RunState.of(read_state(tmp_path)) == state


def test_an_older_state_is_read() -> None:
    """Checkpoints from before the guard and the best metric have less."""
    state = RunState.of({"step": 2, "sampler": {}, "kl_coef": 0.1})
    assert (state.step, state.guard, state.best, state.pending) == (2, None, None, None)
