"""The proof itself, over a run without a model: what it lets through, and what it finds."""

import sys
from pathlib import Path

import pytest

from tests.proofs.kills import __main__ as kills
from tests.proofs.kills.training import Training

pytestmark = pytest.mark.slow
FAKE = Path(__file__).with_name("fake_run.py")
SAVING_FIRST, DRIVER_FIRST = 6, 2
"""Seeds whose first kill comes while a checkpoint is half written, and after a step."""


def run(folder: Path, num_kills: int, fault: str) -> Training:
    return Training(folder, [sys.executable, str(FAKE), str(folder), str(8 + 4 * num_kills), fault])


def prove(tmp_path: Path, num_kills: int, seed: int = 0, fault: str = "none") -> kills.Report:
    calm = run(tmp_path / "undisturbed", num_kills, "none")
    return kills.prove(calm, run(tmp_path / "killed", num_kills, fault), num_kills, seed)


def test_a_run_that_loses_nothing_passes(tmp_path: Path) -> None:
    """An engine after a step, a rank in mid-saving, a driver: the same rows at the end."""
    report = prove(tmp_path, 3)
    assert report.holds, kills.markdown(report)
    assert [death.victim for death in report.deaths] == ["engine", "rank", "driver"]
    assert report.starts >= 3
    assert len(report.outcomes) == 3


def test_a_run_that_takes_up_half_a_checkpoint_is_found(tmp_path: Path) -> None:
    """A folder that was never whole is named, and the metrics that follow are not the same."""
    report = prove(tmp_path, 1, SAVING_FIRST, "loads_broken")
    assert report.broken
    assert report.differences
    assert not report.holds


def test_what_outlives_a_run_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not notice the end of its driver is named, and ended by the proof."""
    monkeypatch.setattr(kills, "GONE_S", 0.5)
    report = prove(tmp_path, 1, DRIVER_FIRST, "leaves_orphans")
    assert any("ray::ActorHost" in name for name in report.left)
    assert not report.holds
