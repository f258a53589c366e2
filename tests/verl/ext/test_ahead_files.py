"""Finished trajectories of later steps in a checkpoint are read back unchanged."""

import math
from pathlib import Path

import numpy as np
import pytest

from verl.errors import ModelError
from verl.ext import ahead_files
from verl.types import Origin, Prompt, Segment, Status, Timeline, Trajectory, start_trajectory

START = start_trajectory(Prompt("q", (1, 2), "nq", ("a",), text="who"), "3/0", sample=1, seed=9)


def finished(version: int = 5, status: Status = Status.ANSWERED) -> Trajectory:
    """Return two turns of different weights, with one log-prob missing."""
    first = Segment(Origin.POLICY, (3, 4), "é\n", (-0.1, math.nan), version - 1)
    observation = Segment(Origin.OBSERVATION, (7,), "doc")
    second = Segment(Origin.POLICY, (8, 9), "b", (-1 / 3, -np.float32(0.7).item()), version)
    stats = {"turns": 2.0, "wait_s": np.float32(0.5), "none": math.nan}
    segments = [*START.segments, first, observation, second]
    return Trajectory(START.prompt, segments, status, stats, {"retries": 1}, START.draw,
                      timeline=Timeline(2))  # fmt: skip


def test_a_trajectory_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    """Its tokens, log-probs, versions and counts, with the prompt and seed of its start."""
    ahead_files.write(tmp_path, {("3/0", 1): finished()}, newest=5)
    (entry,) = ahead_files.read(tmp_path).values()
    assert entry.versions == {4, 5}
    trajectory = entry.to_trajectory(START)
    assert repr(trajectory) == repr(finished()).replace("np.float32(0.5)", "0.5")
    other = start_trajectory(Prompt("q", (1, 3), "nq", ("a",)), "3/0", sample=1)
    assert entry.to_trajectory(other) is None  # the prompt in the data has changed


def test_failed_too_new_and_unwritable_trajectories_are_left_out(tmp_path: Path) -> None:
    """They are sampled again after a resume."""
    failed, late, unwritable = finished(status=Status.FAILED), finished(6), finished()
    unwritable.stats["own"] = object()  # type: ignore[assignment]
    trajectories = enumerate((failed, late, unwritable, finished()))
    ahead_files.write(tmp_path, {(f"3/{i}", 0): t for i, t in trajectories}, newest=5)
    assert list(ahead_files.read(tmp_path)) == [("3/3", 0)]


def test_a_missing_file_means_no_trajectories_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    """The error is one line that names the file."""
    assert ahead_files.read(tmp_path) == {}
    ahead_files.write(tmp_path, {("3/0", 1): finished()}, newest=5)
    text = (tmp_path / ahead_files.FILE).read_text()
    for damaged in (text[:-20], text.replace("-0.1,", ""), "[]\n"):
        (tmp_path / ahead_files.FILE).write_text(damaged)
        with pytest.raises(ModelError, match=ahead_files.FILE) as refusal:
            ahead_files.read(tmp_path)
        assert "\n" not in str(refusal.value)
