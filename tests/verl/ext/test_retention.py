"""Which checkpoints of a run are kept."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.verl.checkpoint.slow_ranks import SlowRanks, Watching, names, state
from verl.checkpoint import folders
from verl.checkpoint.saver import Saver
from verl.config import Config
from verl.ext.guard import HEALTHY, HealthyMarks
from verl.ext.retention import Retention, hook


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    return Saver(tmp_path, SlowRanks())


def fill(saver: Saver, scores: list[float | None]) -> None:
    for step, score in enumerate(scores, 1):
        saver.save(state(step, score), wait=True)


def test_the_newest_and_the_best_are_kept(saver: Saver) -> None:
    """Of six checkpoints, the newest two and the best two stay; the later of equals is better."""
    saver.watchers.append(Retention(saver, keep_last=2, keep_best=2))
    fill(saver, [0.5, 0.9, None, 0.5, 0.1, 0.2])
    assert names(saver.root) == [f"global_step_{step}" for step in (2, 4, 5, 6)]


def recorded(metric: str = "val/em", rows: str = "a", number: int | None = None) -> dict[str, Any]:
    """What checkpoints store of a run that validates in this way."""
    config = {"trainer": {"best_metric": metric}, "data": {"val_data_num": number}}
    return {"config": config, "fingerprints": {"validation": rows}}


@pytest.mark.parametrize("other", [
    recorded("val/f1"), recorded(rows="b"), recorded(number=9), {},
])  # fmt: skip
def test_only_comparable_scores_are_ranked(saver: Saver, other: dict[str, Any]) -> None:
    """A high score of another metric, or of other rows, keeps nothing once there is one of these.

    Until then, the best of the other kind stays.
    """
    saver.watchers.append(Retention(saver, keep_last=1, keep_best=1))
    kept = []
    for step, (score, record) in enumerate([
        (0.8, other), (0.9, other), (0.7, other), (None, recorded()), (0.2, recorded()),
        (0.4, recorded()), (0.3, recorded()),
    ], 1):  # fmt: skip
        saver.record = record
        saver.save(state(step, score), wait=True)
        kept.append({folders.step_of(folder) for folder in folders.all_complete(saver.root)})
    assert kept == [{1}, {2}, {2, 3}, {2, 4}, {5}, {6}, {6, 7}]


@pytest.mark.parametrize(("keep_last", "num_kept"), [(None, 4), (2, 3)])
def test_all_are_kept_unless_asked_otherwise(
    saver: Saver, keep_last: int | None, num_kept: int
) -> None:
    """`keep_last=null` deletes nothing; `keep_best` adds one."""
    config = Config()
    config.trainer.keep_last = keep_last
    hook(SimpleNamespace(config=config, saver=saver))  # type: ignore[arg-type]
    fill(saver, [0.9, 0.1, 0.1, 0.1])
    assert len(names(saver.root)) == num_kept


def test_checkpoints_that_the_guard_needs_are_kept(saver: Saver) -> None:
    """The newest healthy one, and the steps that the guard protects, whatever `keep_last`."""
    saver.watchers.append(Retention(saver, keep_last=1, keep_best=0))
    watching = Watching({3})
    saver.watchers += [watching, HealthyMarks(saver.root)]
    fill(saver, [None])
    (saver.root / "global_step_1" / HEALTHY).touch()
    fill(saver, [None])  # step 1 is written again without the mark: nothing is healthy now
    watching.protected_steps = set()
    for step in (2, 3):
        saver.save(state(step), wait=True)
        (saver.root / f"global_step_{step}" / HEALTHY).touch()
    watching.protected_steps = {4}
    for step in (4, 5, 6):
        saver.save(state(step), wait=True)
    assert names(saver.root) == [f"global_step_{step}" for step in (3, 4, 6)]


def test_a_failed_deletion_is_not_a_failed_write(
    saver: Saver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint that cannot be deleted is logged, and the run continues."""

    def denied(step_dir: Path) -> None:
        if step_dir.exists():
            raise PermissionError(13, "Permission denied", str(step_dir))

    saver.watchers.append(Retention(saver, keep_last=1, keep_best=0))
    monkeypatch.setattr(folders, "remove", denied)
    fill(saver, [None] * 3)
    assert names(saver.root) == [f"global_step_{step}" for step in (1, 2, 3)]
    assert "global_step_1 could not be removed" in caplog.text
    assert "could not be written" not in caplog.text
