"""Folders in a machine's memory are removed with their owner process, however it ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl.weights import node_folder
from verl.weights.node_folder import (
    LOCK,
    OTHER_MACHINE_S,
    PREFIX,
    NodeFolder,
    new_path,
    on_node,
    remove_orphans,
)

OWNER = """
import sys, time
from pathlib import Path
from verl.weights.node_folder import NodeFolder
folder = NodeFolder(Path(sys.argv[1]))
(folder.path / "model.safetensors").write_bytes(b"x")
print("ready", flush=True)
time.sleep(60)
"""


def start_owner(path: Path) -> subprocess.Popen[str]:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    return owner


def is_gone(path: Path, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    return not path.exists()


def test_a_killed_owner_leaves_nothing(tmp_path: Path) -> None:
    """SIGKILL leaves no time to clean up, and Ray kills all children before it."""
    path = tmp_path / f"{PREFIX}a"
    owner = start_owner(path)
    assert (path / "model.safetensors").exists()
    for child in psutil.Process(owner.pid).children():
        child.kill()
    owner.kill()
    owner.wait()
    assert is_gone(path)


def test_a_closed_folder_is_removed_at_once(tmp_path: Path) -> None:
    """`close` does not wait for the cleaner."""
    folder = NodeFolder(tmp_path / f"{PREFIX}a")
    (folder.path / "model.safetensors").write_bytes(b"x")
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_only_orphans_are_removed(tmp_path: Path) -> None:
    """Folders left by lost processes or machines are removed; a live run's folder stays."""
    living = NodeFolder(tmp_path / f"{PREFIX}living")
    for name, host in (("left", socket.gethostname()), ("older", ""), ("elsewhere", "node-7"),
                       ("forgotten", "node-8")):  # fmt: skip
        (tmp_path / f"{PREFIX}{name}").mkdir()
        (tmp_path / f"{PREFIX}{name}" / LOCK).write_text(host)
    (tmp_path / f"{PREFIX}half-removed").mkdir()  # without its lock
    (tmp_path / "other").mkdir()
    for name, age in ((f".{PREFIX}torn", 3600), (f".{PREFIX}young", 0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / LOCK).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    os.utime(tmp_path / f"{PREFIX}forgotten", (time.time() - OTHER_MACHINE_S - 1,) * 2)
    remove_orphans(tmp_path)
    remaining = sorted(p.name for p in tmp_path.iterdir())
    elsewhere = f"{PREFIX}elsewhere"  # this machine may not see its lock
    assert remaining == [f".{PREFIX}young", "other", elsewhere, living.path.name]
    living.close()


def test_a_folder_named_by_the_user_follows_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a server of another account may read it; in memory, only the user may."""
    for root, mode in ((tmp_path / "other", 0o700), (tmp_path, 0o755)):
        monkeypatch.setattr(node_folder, "memory_root", lambda: tmp_path / "other")
        root.mkdir(exist_ok=True)
        before = os.umask(0o022)
        folder = NodeFolder(new_path(root))
        os.umask(before)
        assert folder.path.parent == root and folder.path.stat().st_mode & 0o777 == mode
        folder.close()


def test_paths_are_new_each_time() -> None:
    """Two runs on a machine never share a folder."""
    assert new_path() != new_path()
    assert not new_path().exists()


def test_two_nodes_of_one_machine_have_separate_folders(tmp_path: Path) -> None:
    """They share the memory; each owner creates and removes its own folder."""
    path = tmp_path / f"{PREFIX}a"
    first, second = NodeFolder(on_node(path, "1" * 56)), NodeFolder(on_node(path, "2" * 56))
    first.close()
    assert [p.name for p in tmp_path.iterdir()] == [second.path.name]
    second.close()


def test_only_unneeded_versions_are_removed(tmp_path: Path) -> None:
    """The lock, which shows that the owner is alive, stays."""
    folder = NodeFolder(tmp_path / f"{PREFIX}a")
    for version in (1, 2, 3):
        (folder.path / str(version)).mkdir()
    folder.keep_only({"2"})
    assert sorted(path.name for path in folder.path.iterdir()) == [LOCK, "2"]
    folder.close()
