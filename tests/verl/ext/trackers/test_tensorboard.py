"""TensorBoard: each step once, also over restarts and on a full disk."""

import math
from pathlib import Path

import pytest

from tests.full_disk import files_up_to
from verl.monitor.tracking import Tracking


def scalars(folder: Path) -> list[tuple[int, float]]:
    """Read the events with TensorBoard's own reader."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = module.EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in accumulator.Scalars("a/b")]


def test_tensorboard_reads_each_step_once(tmp_path: Path) -> None:
    """Over two starts, of which the second logs the last step again."""
    pytest.importorskip("tensorboard")
    with Tracking("p", "e", "tensorboard", tmp_path) as tracking:
        tracking.rewind(None)
        tracking.log({"a/b": 0.5, "c": math.nan}, 1)
        tracking.log({"a/b": 1.5}, 2)
    with Tracking("p", "e", "tensorboard", tmp_path) as tracking:
        tracking.rewind(1)
        tracking.log({"a/b": 2.5}, 2)
    assert scalars(tmp_path) == [(1, 0.5), (2, 2.5)]


def test_tensorboard_on_a_full_disk_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With metrics.jsonl the run continues, and so does TensorBoard once there is space.

    Without it the run ends. No partial record is left, after which TensorBoard could not read on.
    """
    pytest.importorskip("tensorboard")
    with Tracking("p", "e", ["tensorboard", "jsonl"], tmp_path) as tracking:
        tracking.log({"a/b": 0.5}, 1)
        [file] = (tmp_path / "tensorboard").iterdir()
        with files_up_to(file.stat().st_size + 20):
            tracking.log({"a/b": 1.5}, 2)
            tracking.log({}, 3)
            tracking.rewind(3)
        tracking.log({"a/b": 3.5}, 4)
    assert scalars(tmp_path) == [(1, 0.5), (4, 3.5)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    [line] = [m for m in caplog.messages if "metrics.jsonl has all metrics" in m]
    assert str(file) in line
    with (
        Tracking("p", "e", "tensorboard", tmp_path) as alone,
        files_up_to(1),
        pytest.raises(OSError, match="tfevents"),
    ):
        alone.log({"a/b": 1.5}, 2)
