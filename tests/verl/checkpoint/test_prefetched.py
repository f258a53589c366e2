"""Finished trajectories in a checkpoint: what comes back is what was there."""

import math
from pathlib import Path

import numpy as np
import pytest

from verl.checkpoint import prefetched
from verl.errors import ModelError
from verl.types import Origin, Prompt, Segment, Status, Trajectory, start_trajectory

START = start_trajectory(Prompt("q", (1, 2), "nq", ("a",), text="who"), "3/0", sample=1, seed=9)


def finished(version: int = 5, status: Status = Status.ANSWERED) -> Trajectory:
    """Two turns, the second of which new weights cut; not all log-probs were told."""
    said = Segment(Origin.POLICY, (3, 4), "é\n", (-0.1, math.nan), version)
    seen = Segment(Origin.OBSERVATION, (7,), "doc")
    cut = Segment(Origin.POLICY, (8, 9), "b", (-1 / 3, -np.float32(0.7).item()), version,
                  (version - 1, version))  # fmt: skip
    stats = {"turns": 2.0, "wait_s": np.float32(0.5), "none": math.nan}
    return Trajectory(START.prompt, [*START.segments, said, seen, cut], status, stats,
                      {"retries": 1}, "3/0", 1, 9, replica=2)  # fmt: skip


def test_a_trajectory_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    """Its tokens, log-probs, versions and counts, on the prompt and seed of its start."""
    name = ("3/0", 1, False)
    prefetched.write(tmp_path, {name: finished()}, newest=5)
    (row,) = prefetched.read(tmp_path).values()
    assert row.versions == {4, 5}
    again = row.to_trajectory(START)
    assert again is not None and repr(again) == repr(finished()).replace("np.float32(0.5)", "0.5")
    other = start_trajectory(Prompt("q", (1, 3), "nq", ("a",)), "3/0", sample=1)
    assert row.to_trajectory(other) is None  # the data say something else now


def test_what_broke_is_of_later_weights_or_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    """It is sampled again after a resume."""
    broken, late, strange = finished(status=Status.FAILED), finished(6), finished()
    strange.stats["own"] = object()  # type: ignore[assignment]
    found = {(f"3/{i}", 0, False): t for i, t in enumerate((broken, late, strange, finished()))}
    prefetched.write(tmp_path, found, newest=5)
    assert list(prefetched.read(tmp_path)) == [("3/3", 0, False)]


def test_a_checkpoint_without_the_file_has_none_and_a_damaged_one_is_refused(
    tmp_path: Path,
) -> None:
    """In one line that names the file."""
    assert prefetched.read(tmp_path) == {}
    prefetched.write(tmp_path, {("3/0", 1, False): finished()}, newest=5)
    text = (tmp_path / prefetched.FILE).read_text()
    for damaged in (text[:-20], text.replace("-0.1,", ""), "[]\n"):
        (tmp_path / prefetched.FILE).write_text(damaged)
        with pytest.raises(ModelError, match=prefetched.FILE) as refusal:
            prefetched.read(tmp_path)
        assert "\n" not in str(refusal.value)
