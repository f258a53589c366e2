"""Trackers: everything logged arrives, with one record per step."""

import json
import logging
import math
from pathlib import Path

import pytest

from tests.full_disk import files_up_to
from tests.memory_tracker import MemoryTracker
from verl.errors import ConfigError
from verl.monitor.library_trackers import ID_FILE
from verl.monitor.tracking import Tracking, backend_names, compact


def test_jsonl_has_one_flushed_line_per_step(tmp_path: Path) -> None:
    """A killed run keeps every logged step, and a resumed one appends."""
    path = tmp_path / "run" / "metrics.jsonl"
    tracking = Tracking("p", "e", ["jsonl"], tmp_path / "run")
    tracking.log({"loss": 0.5, "count": 3}, 1)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 0.5, "count": 3.0}
    ]
    tracking.close()
    with Tracking("p", "e", "jsonl", tmp_path / "run") as resumed:
        resumed.log({"loss": math.nan}, 2)
    assert json.loads(path.read_text().splitlines()[1]) == {"step": 2, "loss": None}


def test_unknown_backend_is_refused_before_any_opens(tmp_path: Path) -> None:
    """The error for a mistyped backend lists the valid ones; no file is written."""
    with pytest.raises(ConfigError, match="got wandbb, expected one of console, jsonl"):
        Tracking("p", "e", ["jsonl", "wandbb"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_backend_gets_every_step() -> None:
    """Several trackers receive the same records."""
    first, second = MemoryTracker(), MemoryTracker()
    with Tracking("p", "e", [first, second], ".") as tracking:
        tracking.log({"a": 1}, 1)
        tracking.log({"a": 2}, 2)
    assert first.records == second.records == [(1, {"a": 1.0}), (2, {"a": 2.0})]


def test_console_line_is_compact(caplog: pytest.LogCaptureFixture) -> None:
    """The console shows the step and the key metrics on one line."""
    with caplog.at_level(logging.INFO), Tracking("p", "e", "console", ".") as tracking:
        tracking.log({"val/em": 0.123456, "obscure/detail": 1.0}, 7)
    assert caplog.messages == ["step 7  val/em 0.1235"]


def test_compact_shows_all_where_none_is_key() -> None:
    """If a step has no key metrics, all are shown."""
    assert compact({"x": 1.0, "y": 2.0}) == "x 1  y 2"


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline runs work without account or network and stay below the run's folder."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Tracking("p", "e", ["wandb"], tmp_path, {"seed": 1}) as tracking:
        tracking.log({"loss": 1.0}, 1)
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    first = (tmp_path / ID_FILE).read_text()
    with Tracking("p", "e", "wandb", tmp_path, is_resumed=True):
        assert (tmp_path / ID_FILE).read_text() == first


@pytest.mark.parametrize("option", ["wandb", ["wandb"]])
def test_backend_names_takes_a_name_or_a_list(option: str | list[str]) -> None:
    """Both forms of trainer.logger are accepted."""
    assert backend_names(option) == ["wandb"]


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    """Lines of steps that are logged again, and an incomplete line, are moved to another file."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "x": 1.0}\n{"step": 4, "x"')
    with Tracking("p", "e", ["jsonl"], tmp_path) as tracking:
        tracking.rewind(2)
        tracking.log({"x": 9.0}, 3)
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert steps == [{"step": 1}, {"step": 2}, {"step": 3, "x": 9.0}]
    aside = (tmp_path / "metrics.superseded.jsonl").read_text()
    assert aside == '{"step": 3, "x": 1.0}\n{"step": 4, "x"'


def test_a_run_that_starts_over_drops_only_its_own_steps(tmp_path: Path) -> None:
    """Steps that an earlier run logged in the same folder are kept."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5}\n')
    with Tracking("p", "e", ["jsonl"], tmp_path) as tracking:
        tracking.log({}, 1)
        tracking.rewind(None)
        tracking.log({}, 1)
    assert path.read_text() == '{"step": 5}\n{"step": 1}\n'


def test_nothing_is_rewritten_without_superseded_steps(tmp_path: Path) -> None:
    """The file of a run that continues from its last step is not replaced."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 5}\n')
    inode = path.stat().st_ino
    with Tracking("p", "e", ["jsonl"], tmp_path) as tracking:
        tracking.rewind(5)
    assert path.stat().st_ino == inode
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


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
    [line] = [m for m in caplog.messages if "metrics.jsonl has the missing metrics" in m]
    assert str(file) in line
    with (
        Tracking("p", "e", "tensorboard", tmp_path) as alone,
        files_up_to(1),
        pytest.raises(OSError, match="tfevents"),
    ):
        alone.log({"a/b": 1.5}, 2)
