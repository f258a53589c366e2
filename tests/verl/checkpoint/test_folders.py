"""Checkpoint folders: complete or absent at every moment; the driver's state is restored."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import writing
from verl.checkpoint import contents, folders
from verl.checkpoint.folders import RunState, write_state
from verl.errors import ConfigError, ModelError
from verl.training.checkpoint_files import read_driver_random, write_driver_random

FORK = multiprocessing.get_context("fork")


def run_and_die(work: Callable[[], object]) -> None:
    """Run `work`, which kills its own process, in a fork."""
    process = FORK.Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def save(root: Path, step: int) -> Path:
    """Write a checkpoint that contains its step."""
    with writing(root, step) as folder:
        folders.write_state(folder, {"step": step})
    return folders.step_folder(root, step)


def test_only_complete_checkpoints_are_found(tmp_path: Path) -> None:
    """Folders without marker, or with a temporary name, are never resumed from."""
    assert folders.latest(tmp_path) is None
    for step in (2, 10):
        save(tmp_path, step)
    (tmp_path / "global_step_11").mkdir()
    (tmp_path / "global_step_12.tmp").mkdir()
    (tmp_path / "global_step_12.tmp" / folders.MARKER).touch()
    found = folders.latest(tmp_path)
    assert found is not None and folders.read_state(found) == {"step": 10}
    assert folders.resume_folder("auto", tmp_path) == found
    assert folders.resume_folder("disable", tmp_path) is None
    with pytest.raises(ConfigError, match="COMPLETE"):
        folders.resume_folder(str(tmp_path / "global_step_11"), tmp_path)


def test_line_21_a_run_killed_while_saving_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """A process that dies while writing loses only that checkpoint."""
    save(tmp_path, 1)

    def die_while_writing() -> None:
        with writing(tmp_path, 2) as folder:
            folders.write_state(folder, {"step": 2})
            os.kill(os.getpid(), signal.SIGKILL)

    run_and_die(die_while_writing)
    found = folders.latest(tmp_path)
    assert found is not None and folders.read_state(found) == {"step": 1}
    with writing(tmp_path, 2) as folder:
        assert list(folder.iterdir()) == []


def test_half_written_checkpoints_are_removed_at_the_next_start(tmp_path: Path) -> None:
    """Complete checkpoints and other folders stay."""
    save(tmp_path, 1)
    run_and_die(lambda: (folders.begin(tmp_path, 2), os.kill(os.getpid(), signal.SIGKILL)))
    # Another framework's checkpoint: it has no marker, but must not be deleted.
    (tmp_path / "global_step_7").mkdir()
    (tmp_path / "model.tmp").mkdir()
    assert len(list(tmp_path.glob("global_step_2.*.tmp"))) == 1
    folders.clean_up(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "global_step_1", "global_step_7", "model.tmp",
    ]  # fmt: skip


def test_a_replacement_never_loses_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at any rename while step 1 is saved again, the next start finds a complete step 1."""
    real, calls = os.replace, 0

    def dying(*names: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == fatal:
            raise KeyboardInterrupt
        real(*names)

    for fatal in (1, 2):
        root = tmp_path / str(fatal)
        save(root, 1)
        calls = 0
        monkeypatch.setattr(folders.os, "replace", dying)
        pending = folders.begin(root, 1)
        folders.write_state(pending.folder, {"step": 1, "again": True})
        with pytest.raises(KeyboardInterrupt):
            folders.publish(pending)
        monkeypatch.setattr(folders.os, "replace", real)
        folders.clean_up(root)
        found = folders.latest(root)
        assert found is not None and folders.read_state(found)["again"]
        assert len(list(root.iterdir())) == 1


def test_a_complete_checkpoint_is_not_replaced_by_an_unpublished_one(tmp_path: Path) -> None:
    """Killed when both are complete, before the older one lost its marker: the older one stays."""
    save(tmp_path, 1)
    pending = folders.begin(tmp_path, 1)
    folders.write_state(pending.folder, {"step": 1, "again": True})
    (pending.folder / folders.MARKER).touch()
    folders.clean_up(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]
    assert folders.read_state(tmp_path / "global_step_1") == {"step": 1}


def test_all_files_are_on_disk_before_the_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and folders before the marker, the marker and its folder before the rename, then it."""
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace
    pending = folders.begin(tmp_path, 1)
    (pending.folder / "shards").mkdir()
    for name in ("shards/a.distcp", folders.STATE_FILE):
        (pending.folder / name).write_text("{}")

    def recording_fsync(handle: int) -> None:
        state = "marked" if (pending.folder / folders.MARKER).exists() else "unmarked"
        path = os.readlink(f"/proc/self/fd/{handle}")
        events.append((path.removeprefix(str(pending.folder)), state))
        fsync(handle)

    def recording_replace(old: Path, new: Path) -> None:
        events.append(("replace", ""))
        replace(old, new)

    monkeypatch.setattr(folders.os, "fsync", recording_fsync)
    monkeypatch.setattr(folders.os, "replace", recording_replace)
    folders.publish(pending)
    inside = {"/shards", "/shards/a.distcp", f"/{folders.STATE_FILE}"}
    assert {(path, "unmarked") for path in inside} == set(events[: len(inside)])
    assert events[len(inside) :] == [
        (f"/{folders.MARKER}", "marked"), ("", "marked"), ("replace", ""),
        (str(tmp_path), "unmarked"),
    ]  # fmt: skip


def test_small_files_are_compared_by_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including that size; for larger files only the size, since tensors have checksums."""
    monkeypatch.setattr(contents, "HASHED_BYTES", 3)
    with writing(tmp_path, 1) as folder:
        (folder / "small").write_text("abc")
        (folder / "large").write_text("abcd")
    step_dir = folders.step_folder(tmp_path, 1)
    (step_dir / "large").write_text("dcba")
    contents.check_files(step_dir)
    (step_dir / "small").write_text("cba")
    with pytest.raises(ModelError, match="small is missing or has changed since it was written"):
        contents.check_files(step_dir)


def test_later_steps_of_an_earlier_run_are_set_aside(tmp_path: Path) -> None:
    """A run that starts at step 2 never resumes from another run's step 5, which is kept."""
    for step in (1, 2, 5):
        save(tmp_path, step)
    (tmp_path / "validation").mkdir()
    folders.set_aside(tmp_path, after=2)
    (moved,) = tmp_path.glob("set_aside/*/*")
    assert folders.read_state(moved) == {"step": 5}
    assert folders.latest(tmp_path) == folders.step_folder(tmp_path, 2)
    folders.set_aside(tmp_path, after=2)
    assert len(list(tmp_path.glob("set_aside/*"))) == 1


def test_a_fresh_run_has_no_validations_of_another(tmp_path: Path) -> None:
    """Validation dialogues of an earlier run are set aside with its checkpoints."""
    save(tmp_path, 1)
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "step_3.jsonl").touch()
    folders.set_aside(tmp_path, after=-1)
    assert len(list(tmp_path.glob("set_aside/*/validation/step_3.jsonl"))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set_aside"]


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_random_states_of_the_driver_are_restored(tmp_path: Path) -> None:
    """Python, NumPy and torch draw the same numbers again."""
    write_driver_random(tmp_path)
    drawn = draw()
    assert draw() != drawn
    read_driver_random(tmp_path)
    assert draw() == drawn


def test_a_state_goes_through_json(tmp_path: Path) -> None:
    """Every field, stored together with the run's identity."""
    state = RunState(
        3, {"epoch": 1}, 0.5, {"value": 0.25, "step": 2}, 0.125, {"loss": 1.5},
        others={"reward": {"stage": 2}, "guard": {"healthy": 1}},
    )  # fmt: skip
    step_dir = tmp_path / "global_step_3"
    step_dir.mkdir()
    write_state(step_dir, {**asdict(state), "fingerprints": {"data": "x"}})
    assert RunState.read(step_dir) == state


def test_an_older_state_is_read(tmp_path: Path) -> None:
    """Those before the best metric lack it, and states of parts stood beside `others`."""
    step_dir = tmp_path / "global_step_2"
    step_dir.mkdir()
    earlier = {"reward": {"index": 1}, "ahead": [{"step": 3}], "guard": None}
    write_state(step_dir, {"step": 2, "sampler": {}, "kl_coef": 0.1, **earlier, "others": {"x": 1}})
    state = RunState.read(step_dir)
    assert (state.step, state.best, state.pending) == (2, None, None)
    assert state.others == {"reward": {"index": 1}, "ahead": [{"step": 3}], "x": 1}
