"""The phase of a run."""

from pathlib import Path

from benchmarks.kills.phases import phase_of

ROW = {"step": 1.0, "timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "timing_s/step": 3.0}


def test_the_phase_follows_the_clock(tmp_path: Path) -> None:
    """Generation first, then the update, then whatever comes between two steps."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n")
    ended = path.stat().st_mtime
    found = [phase_of(path, [ROW], False, ended + seconds) for seconds in (1.0, 2.5, 3.5)]
    assert found == ["gen", "update_actor", "between steps or starting"]


def test_saving_and_starting_are_told(tmp_path: Path) -> None:
    """A half-written checkpoint says it all; without a step yet the run is starting."""
    assert phase_of(tmp_path / "none", [ROW], True) == "saving"
    assert phase_of(tmp_path / "none", [], False) == "starting"
