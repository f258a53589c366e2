"""When checkpoints are due, and what happens after a failed write."""

import threading
from pathlib import Path

import pytest

from tests.verl.checkpoint.slow_ranks import SlowRanks, Watching, names, state
from verl.checkpoint import folders
from verl.checkpoint.folders import PendingCheckpoint
from verl.checkpoint.saver import SavePlan, Saver
from verl.config import TrainerConfig
from verl.errors import SaveError


@pytest.fixture
def ranks() -> SlowRanks:
    return SlowRanks()


@pytest.fixture
def saver(tmp_path: Path, ranks: SlowRanks) -> Saver:
    return Saver(tmp_path, ranks)


def test_a_checkpoint_appears_when_all_have_written_it(saver: Saver, ranks: SlowRanks) -> None:
    """While ranks write, training continues and there is nothing to resume from."""
    saver.save(state(1))
    assert folders.latest(saver.root) is None
    saver.poll()
    assert ranks.calls == ["start"]
    ranks.go_on.set()
    saver.finish_pending()
    assert names(saver.root) == ["global_step_1"]
    assert folders.read_state(saver.root / "global_step_1")["step"] == 1


def test_extra_files_are_written_with_the_ranks_shards(saver: Saver, ranks: SlowRanks) -> None:
    """They are written in the background, after the shards and before the checkpoint appears."""
    saver.save(state(1), write_extra=lambda folder: (folder / "own").touch())
    (pending,) = saver.root.iterdir()
    assert not (pending / "own").exists()
    ranks.go_on.set()
    saver.finish_pending()
    saver.save(state(2), wait=True, write_extra=lambda folder: (folder / "own").touch())
    listed = [(saver.root / name / folders.MARKER).read_text() for name in names(saver.root)]
    assert len(listed) == 2 and all('"own"' in text for text in listed)


def test_a_write_does_not_keep_the_process_from_exiting(saver: Saver, ranks: SlowRanks) -> None:
    """If the run ends during a write, its thread ends too."""
    saver.save(state(1))
    [thread] = [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    assert thread.daemon
    ranks.go_on.set()
    saver.finish_pending()


def test_the_first_write_of_a_run_may_fail(saver: Saver, ranks: SlowRanks) -> None:
    """Like any later single failure."""
    ranks.go_on.set()
    ranks.problem = "full"
    saver.save(state(1))
    saver.finish_pending()
    assert (names(saver.root), saver.last_step) == ([], None)


@pytest.mark.parametrize(
    ("folder", "last_step"), [("b", 3), ("b/../b", 3), ("a", None), ("c", None), ("b/x", None)]
)
def test_only_the_runs_own_checkpoint_is_not_written_again(
    folder: str, last_step: int | None, ranks: SlowRanks, tmp_path: Path
) -> None:
    """A run that resumes from another folder writes that step into its own folder."""
    saver = Saver(tmp_path / "b", ranks)
    saver.root.mkdir()
    saver.record_resume(tmp_path / folder / "global_step_3")
    assert saver.last_step == last_step


def test_the_next_save_waits_for_the_one_before(saver: Saver, ranks: SlowRanks) -> None:
    """Two writes never overlap."""
    saver.save(state(1))
    threading.Timer(0.05, ranks.go_on.set).start()
    saver.save(state(2))
    saver.finish_pending()
    assert names(saver.root) == ["global_step_1", "global_step_2"]


def test_without_memory_for_a_copy_training_waits(saver: Saver, ranks: SlowRanks) -> None:
    """A host whose memory is too small for the copy does not run out of memory."""
    ranks.can_copy = False
    saver.save(state(1))
    assert ranks.calls == ["save"]
    assert names(saver.root) == ["global_step_1"]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_failed_write_does_not_end_the_run_but_a_second_does(
    saver: Saver, ranks: SlowRanks, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The first is logged with the last good checkpoint, and its files are removed."""
    ranks.can_copy = is_async
    ranks.go_on.set()
    lost: list[int] = []
    saver.watchers.append(Watching(lost=lost))
    saver.save(state(1))
    saver.finish_pending()
    ranks.problem = "rank 1: OSError: No space left on device"
    saver.save(state(2))
    saver.finish_pending()
    assert "No space left" in caplog.text
    assert "global_step_1" in caplog.text
    assert lost == [2]
    assert names(saver.root) == ["global_step_1"]
    with pytest.raises(SaveError, match="step 3"):
        saver.save(state(3))
        saver.finish_pending()
    ranks.problem = ""
    saver.save(state(4))
    saver.finish_pending()
    ranks.problem = "again"
    saver.save(state(5))  # a success in between restarts the count
    saver.finish_pending()


def test_the_last_save_of_a_run_may_not_fail(saver: Saver, ranks: SlowRanks) -> None:
    """An interrupted run must not report that it was saved if it was not."""
    ranks.problem = "full"
    with pytest.raises(SaveError):
        saver.save(state(1), wait=True)
    assert names(saver.root) == []


@pytest.mark.parametrize("is_started", [True, False])
def test_an_interrupted_write_leaves_nothing(
    saver: Saver, ranks: SlowRanks, is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while ranks write, or before there is a folder, is raised unchanged."""

    def interrupted(*_: object) -> PendingCheckpoint:
        raise KeyboardInterrupt

    if is_started:
        monkeypatch.setattr(ranks, "save_checkpoint", interrupted)
    else:
        monkeypatch.setattr(folders, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saver.save(state(1), wait=True)
    assert names(saver.root) == []


def test_the_longest_save_is_timed(saver: Saver, ranks: SlowRanks) -> None:
    """Nothing is known of it before the first."""
    assert saver.longest_s == 0.0
    ranks.go_on.set()
    saver.save(state(1))
    saver.finish_pending()
    assert 0.0 < saver.longest_s < 30.0


def test_checkpoints_are_due_by_steps_and_by_minutes() -> None:
    """Minutes count from the last save; the last step is saved unless `save_freq` is 0."""
    now = 0.0
    config = TrainerConfig(save_freq=10, save_minutes=30.0)
    plan = SavePlan(config, total_steps=25, clock=lambda: now)
    assert [step for step in range(1, 26) if plan.is_due(step)] == [10, 20, 25]
    now = 1799.0
    assert not plan.is_due(3)
    now = 1800.0
    assert plan.is_due(3)
    plan.record_save()
    assert not plan.is_due(4)
    config.save_freq = 0
    assert not plan.is_due(25)
    config.save_freq = -1
    assert plan.is_due(25)
    assert not plan.is_due(10)


def test_a_write_that_a_lost_rank_delays_is_reported_as_such(
    saver: Saver, ranks: SlowRanks, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of the run waits for a limited time, and the message does not blame the disk."""
    saver.save(state(1))
    saver.close(timeout_s=0.01)
    assert "step 1 was not completed within 0.01 s" in caplog.text
    assert "could not be written" not in caplog.text
    ranks.go_on.set()
