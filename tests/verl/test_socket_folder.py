"""Folders for Unix sockets under the TMPDIR of a job."""

import logging
import os
import socket
from pathlib import Path

import pytest

from verl.errors import ResourceError
from verl.socket_folder import MAX_PATH_BYTES, socket_folder
from verl.trainer.cluster import RAY_ROOM


def test_the_longest_path_is_the_kernels(tmp_path: Path) -> None:
    """A socket can be bound at a path of this size, and at none that is longer."""
    stem = os.path.relpath(tmp_path)  # only its length matters
    assert len(stem) < MAX_PATH_BYTES
    for size, is_bound in ((MAX_PATH_BYTES, True), (MAX_PATH_BYTES + 1, False)):
        with socket.socket(socket.AF_UNIX) as bound:
            path = stem + "/" + "x" * (size - len(stem) - 1)
            if is_bound:
                bound.bind(path)
            else:
                with pytest.raises(OSError, match="too long"):
                    bound.bind(path)


def test_rays_sockets_fit() -> None:
    """The room is enough for the longest name that Ray gives a session of today."""
    name = "ray/session_2026-11-28_04-20-00_123456_4194304/sockets/plasma_store.10"
    assert len(f"/{name}") <= RAY_ROOM


@pytest.mark.parametrize("letter", ["x", "é", "名"])
def test_a_long_folder_is_replaced_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, letter: str
) -> None:
    """Bytes count, not characters; the first variable that is set decides."""
    long = tmp_path / (letter * 60)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    with caplog.at_level(logging.WARNING):
        assert socket_folder("RAY_TMPDIR", "TMPDIR", room=RAY_ROOM) == "/tmp"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "TMPDIR" in line and "/tmp" in line and "\n" not in line


def test_a_folder_that_fits_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the default, and that of the variable that comes first."""
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert socket_folder("RAY_TMPDIR", "TMPDIR", room=RAY_ROOM) == "/tmp"
    monkeypatch.setenv("TMPDIR", "/no/such/folder")
    monkeypatch.setenv("RAY_TMPDIR", "/dev/shm")
    assert socket_folder("RAY_TMPDIR", "TMPDIR", room=RAY_ROOM) == "/dev/shm"


def test_a_folder_that_is_missing_or_no_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the variable."""
    (tmp_path / "file").write_text("")
    for name in ("absent", "file", "file/below"):
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
        with pytest.raises(ResourceError, match=r"^TMPDIR: got .*unset TMPDIR"):
            socket_folder("TMPDIR", room=10)
