"""The proof itself, on a fake run without a model: what passes and what is found."""

import sys
from pathlib import Path

import pytest

from tests.nightly.proofs.kills import __main__ as kills
from tests.nightly.proofs.kills.training import Training

pytestmark = pytest.mark.slow
FAKE = Path(__file__).with_name("fake_run.py")
SAVING_FIRST, DRIVER_FIRST = 6, 2
"""Seeds whose first kill is while a checkpoint is half written, or after a step."""


def run(folder: Path, num_kills: int, fault: str) -> Training:
    return Training(folder, [sys.executable, str(FAKE), str(folder), str(8 + 4 * num_kills), fault])


def prove(tmp_path: Path, num_kills: int, seed: int = 0, fault: str = "none") -> kills.Report:
    calm = run(tmp_path / "undisturbed", num_kills, "none")
    return kills.prove(calm, run(tmp_path / "killed", num_kills, fault), num_kills, seed)


def test_a_run_that_loses_nothing_passes(tmp_path: Path) -> None:
    """An engine after a step, a rank during saving, a driver: the rows are equal at the end."""
    report = prove(tmp_path, 3)
    assert report.holds, kills.markdown(report)
    assert [death.victim for death in report.deaths] == ["engine", "rank", "driver"]
    assert report.starts >= 3
    assert len(report.outcomes) == 3


def test_a_resume_from_a_half_written_checkpoint_is_found(tmp_path: Path) -> None:
    """The incomplete folder is named, and the later metrics differ."""
    report = prove(tmp_path, 1, SAVING_FIRST, "loads_broken")
    assert report.broken
    assert report.differences
    assert not report.holds


def test_leftover_processes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not end with its driver is named, and ended by the proof."""
    monkeypatch.setattr(kills, "GONE_S", 0.5)
    report = prove(tmp_path, 1, DRIVER_FIRST, "leaves_orphans")
    assert any("ray::ActorHost" in name for name in report.left)
    assert not report.holds
