"""Atomic writes, append-only files, and locks on output folders."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from search_r1 import cli
from tests.full_disk import files_up_to
from verl.checkpoint.exporting import whole_folder
from verl.errors import ConfigError
from verl.ext.sft import trainer as sft
from verl.files import LineWriter, atomic_write, exclusive_lock, is_file_error
from verl.trainer import main_ppo


@pytest.mark.parametrize("is_durable", [True, False])
@pytest.mark.parametrize("fails_in", ["body", "fsync", "replace", None])
def test_atomic_write_replaces_the_file_or_leaves_it_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_in: str | None, is_durable: bool
) -> None:
    """If the body, fsync or rename fails, the old content stays and no temporary file remains."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "f"
    path.write_text("old")
    if fails_in in ("fsync", "replace"):
        monkeypatch.setattr(os, fails_in, fail)
    try:
        with atomic_write(path, is_durable=is_durable) as part:
            part.write_text("new")
            assert path.read_text() == "old"
            if fails_in == "body":
                fail()
    except KeyboardInterrupt:
        assert fails_in is not None
    is_old = fails_in in ("body", "replace") or (fails_in == "fsync" and is_durable)
    assert path.read_text() == ("old" if is_old else "new")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("num_bytes", [0, 1, 5])
def test_a_line_is_appended_completely_or_not_at_all(tmp_path: Path, num_bytes: int) -> None:
    """If the disk fills up within a line, earlier lines stay and the error names the file."""
    lines = LineWriter(tmp_path / "f")
    lines.append("first")
    with files_up_to(6 + num_bytes), pytest.raises(OSError, match="f'") as caught:
        lines.append("second")
    assert is_file_error(caught.value) and not is_file_error(ConnectionResetError(104, "reset"))
    lines.append("third \ud800")
    lines.close()
    assert (tmp_path / "f").read_text() == "first\nthird \\ud800\n"


def test_atomic_write_names_the_file_if_the_disk_is_full(tmp_path: Path) -> None:
    """The old content stays, and the error names the target file, unless a connection failed."""
    (tmp_path / "f").write_text("old")
    with (
        files_up_to(2),
        pytest.raises(OSError, match=r"/f'$"),
        atomic_write(tmp_path / "f") as part,
    ):
        part.write_text("newer")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    with pytest.raises(ConnectionResetError) as caught, atomic_write(tmp_path / "f"):
        raise ConnectionResetError(104, "reset")
    assert not is_file_error(caught.value)


FORK = multiprocessing.get_context("fork")


def test_a_folder_is_locked_until_its_process_ends(tmp_path: Path) -> None:
    """A second process is refused until the first has ended, even if it was killed."""
    held = FORK.Event()

    def hold() -> None:
        with exclusive_lock(tmp_path, "--out"):
            held.set()
            signal.pause()

    first = FORK.Process(target=hold)
    first.start()
    assert held.wait(60)
    with (
        pytest.raises(ConfigError, match="--out"),
        exclusive_lock(tmp_path, "--out"),
    ):
        raise AssertionError("entered a locked folder")
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    first.join(60)
    for _ in range(2):
        with exclusive_lock(tmp_path, "--out"):
            pass


def train(out: Path, *options: str) -> int:
    given = ("data.train_files=none", "data.val_files=none", "actor_rollout_ref.model.path=none")
    return main_ppo.main([*given, f"trainer.default_local_dir={out}", *options])


def train_elsewhere(out: Path) -> int:
    return train(out.parent / "run", f"trainer.rollout_data_dir={out}")


def validate(out: Path) -> int:
    return train(out, "trainer.val_only=true")


def fine_tune(out: Path) -> int:
    return sft.main(["model_path=none", "train_file=none", f"output_dir={out}"])


def evaluate(out: Path) -> int:
    return cli.main(["evaluate", "--model", "none", "--data", "none", "--out", str(out)])


@pytest.mark.parametrize("command", [train, train_elsewhere, validate, evaluate, fine_tune])
def test_a_second_run_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Callable[[Path], int]
) -> None:
    """Status 2 and one line, before missing models or questions are noticed; no file appears."""
    out = tmp_path / "out"
    holder = whole_folder(out, "") if command is fine_tune else exclusive_lock(out, "")
    with holder:
        before = sorted(tmp_path.rglob("*"))
        assert command(out) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "which another run is writing to" in line and "fix:" in line
        assert set(tmp_path.rglob("*")) - set(before) <= {tmp_path / "run", tmp_path / "run/.lock"}
        if command is fine_tune:
            (out.with_name("out.tmp") / "config.json").touch()


@pytest.mark.parametrize("command", [train, evaluate, fine_tune])
@pytest.mark.parametrize("place", ["file/out", "/proc/out"])
def test_a_folder_that_cannot_be_created_gives_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: Callable[[Path], int], place: str
) -> None:
    """Inside a file, or where nothing can be written."""
    (tmp_path / "file").touch()
    assert command(tmp_path / place) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a folder that can be written" in line


@pytest.mark.parametrize("files", [["thesis.txt"], ["a/b.txt"]])
def test_only_a_model_folder_is_replaced(tmp_path: Path, files: Sequence[str]) -> None:
    """A folder with other content is never deleted; an older model is replaced."""
    for name in files:
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text("years of work")
    with pytest.raises(ConfigError, match="--out"), whole_folder(tmp_path / "out", "--out"):
        raise AssertionError("about to delete the folder")
    for name in ("new", "new"):
        with whole_folder(tmp_path / name, "--out") as part:
            (part / "config.json").write_text("{}")
    assert (tmp_path / "out" / files[0]).read_text() == "years of work"
