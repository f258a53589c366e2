"""Curves from a log that grows, is truncated and is rewritten."""

import json
import os
from pathlib import Path

from search_r1.view.run import MetricsLog, downsample
from verl.monitor.tracking import JsonlTracker


def test_an_incomplete_last_line_waits_for_its_end(tmp_path: Path) -> None:
    """A line that is written in two parts is read once, when it is complete."""
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert not log.refresh() and log.names() == []
    line = json.dumps({"step": 1, "a": 0.5, "b": None}) + "\n"
    with log.path.open("w") as file:
        file.write(line + '{"step": 2, "a"')
    assert log.refresh() and log.curve("a") == ([1], [0.5]) and log.curve("b") == ([1], [None])
    assert not log.refresh()
    with log.path.open("a") as file:
        file.write(": 0.25}\nnonsense\n[1]\n")
    assert log.refresh() and log.curve("a") == ([1, 2], [0.5, 0.25])


def test_a_run_that_went_back_shows_its_new_steps_only(tmp_path: Path) -> None:
    """The tracker rewrites the file when a run resumes; steps that it removed disappear."""
    tracker, log = JsonlTracker(tmp_path), MetricsLog(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        tracker.log({"a": float(step)}, step)
    log.refresh()
    tracker.rewind(1)
    tracker.log({"a": 20.0}, 2)
    tracker.close()
    assert log.refresh() and log.curve("a") == ([1, 2], [1.0, 20.0])
    os.truncate(log.path, 0)
    assert log.refresh() and log.names() == []


def test_rows_that_a_request_reads_never_change(tmp_path: Path) -> None:
    """Metrics added to a step that was already read go into a new dictionary."""
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.path.write_text('{"step": 1, "a": 0.5}\n')
    log.refresh()
    seen = log.rows[1]
    with log.path.open("a") as file:
        file.write('{"step": 1, "val/em": 1.0}\n')
    assert log.refresh() and seen == {"a": 0.5} and log.rows[1] == {"a": 0.5, "val/em": 1.0}


def test_a_downsampled_curve_keeps_ends_and_peaks() -> None:
    """It has at most the requested points, with the first, the last, maximum and minimum."""
    points = [(i, float(i % 7)) for i in range(1000)]
    points[400], points[700] = (400, 99.0), (700, -99.0)
    points[5] = (5, None)
    found = downsample(points, 50)
    assert len(found) <= 50 and found == sorted(found)
    assert {points[0], points[-1], points[400], points[700]} <= set(found)
