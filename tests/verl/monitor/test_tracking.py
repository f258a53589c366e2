"""Trackers: everything logged arrives, with one record per step."""

import json
import logging
import math
from pathlib import Path

import pytest

from verl.errors import ConfigError
from verl.monitor.tracking import Tracking


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
    with pytest.raises(ConfigError, match="wandbb"):
        Tracking("p", "e", ["jsonl", "wandbb"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_console_line_is_compact(caplog: pytest.LogCaptureFixture) -> None:
    """The console shows the step and the key metrics on one line."""
    with caplog.at_level(logging.INFO), Tracking("p", "e", "console", ".") as tracking:
        tracking.log({"val/em": 0.123456, "obscure/detail": 1.0}, 7)
    assert caplog.messages == ["step 7  val/em 0.1235"]


OWN = """
from verl.monitor.tracking import Tracker

class Own(Tracker):
    def __init__(self, run):
        self.file = run.directory / f"{run.project}-{run.experiment}"

    def log(self, metrics, step):
        if step == 2:
            raise ValueError("not this one")
        self.file.write_text(f"{step} {metrics}")

def broken(run):
    raise OSError("no server")
"""


def test_a_tracker_of_a_file_is_opened_and_may_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends the run only if `metrics.jsonl` does not have the metrics, and is warned of once."""
    (tmp_path / "own.py").write_text(OWN)
    own = f"{tmp_path}/own.py:Own"
    with Tracking("p", "e", [own, "jsonl"], tmp_path) as tracking:
        for step in (2, 2, 3):
            tracking.log({"a": 1}, step)
    assert (tmp_path / "p-e").read_text() == "3 {'a': 1.0}"
    assert [m for m in caplog.messages if "Own: ValueError: not this one" in m] == caplog.messages
    assert len(caplog.messages) == 1
    with Tracking("p", "e", own, tmp_path) as alone, pytest.raises(ValueError, match="not this"):
        alone.log({"a": 1}, 2)
    with pytest.raises(ConfigError, match=r"trainer\.logger"):
        Tracking("p", "e", f"{tmp_path}/own.py:broken", tmp_path)


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
