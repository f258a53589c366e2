"""wandb without network: nothing fails, nothing hangs, nothing is lost."""

from __future__ import annotations

import logging
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl.monitor.library_trackers import (
    ID_FILE,
    WandbTracker,
    offline_reason,
    run_id,
    sync_command,
)
from verl.monitor.tracking import Tracking

wandb = pytest.importorskip("wandb")

KEY = "0123456789" * 4


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove wandb's account, settings and variables."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_ID", "WANDB_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(home))
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def parts(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def our_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of our tracker, without wandb's own."""
    return [r.getMessage() for r in caplog.records if r.name == "verl.monitor.library_trackers"]


def test_no_key_means_offline_with_the_command_to_upload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an account the run continues offline; the upload command is logged at the end."""
    out = tmp_path / "run"
    with caplog.at_level(logging.INFO):
        tracker = WandbTracker("p", "e", out, {"seed": 1})
        tracker.log({"loss": 0.512}, 1)
        tracker.log({"loss": 0.256}, 2)
        tracker.close()
    wandb.teardown()  # its service, which may answer before the file has everything, ends with it
    [part] = parts(out)
    written = next(part.glob("run-*.wandb")).read_bytes()
    assert written.index(b"0.512") < written.index(b"0.256")
    first, last = our_messages(caplog)
    assert first.startswith("wandb: no API key")
    assert last.endswith(f"wandb sync --id {tracker.run_id} {part}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB, which only root may create."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk needs root, and the right to mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_reported_once_and_not_left_to_wandb(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """wandb loses steps silently: the tracker ends the run, but not one with metrics.jsonl.

    With space again, wandb gets the steps that follow.
    """
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(small_disk))
    filler, full = small_disk / "filler", bytes((3 << 20) + (1 << 19))
    with Tracking("p", "e", ["wandb", "jsonl"], tmp_path) as both:
        filler.write_bytes(full)
        for step in (1, 2):
            both.log({"loss": 0.5}, step)
        filler.unlink()
        both.log({"loss": 0.75}, 3)
    [line] = [m for m in caplog.messages if "metrics.jsonl has the missing metrics" in m]
    assert str(small_disk) in line
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    with Tracking("p", "e", "wandb", tmp_path) as alone:
        filler.write_bytes(full)
        with pytest.raises(OSError, match=r"No space left.*disk"):
            alone.log({"loss": 0.5}, 4)
    wandb.teardown()
    files = small_disk.glob("wandb/offline-run-*/run-*.wandb")
    assert any(b"0.75" in file.read_bytes() for file in files)


def test_a_server_out_of_reach_means_offline(
    tmp_path: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an account but without network, the run neither fails nor waits for the server."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port}")
    assert offline_reason(wandb) == f"http://127.0.0.1:{closed_port} does not answer (ConnectError)"
    tracker = WandbTracker("p", "e", tmp_path, {})
    tracker.close()
    assert tracker.is_offline
    assert len(parts(tmp_path)) == 1


def test_wandb_mode_is_not_overridden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """WANDB_MODE=disabled writes nothing, and neither key nor network is checked."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with caplog.at_level(logging.INFO):
        tracker = WandbTracker("p", "e", tmp_path, {})
        tracker.log({"loss": 1.0}, 1)
        tracker.close()
    assert our_messages(caplog) == []
    assert parts(tmp_path) == []


def test_a_resumed_run_continues_the_same_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both parts have one id, and one command uploads both, the older first."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    first = WandbTracker("p", "e", tmp_path, {})
    first.log({"loss": 1.0}, 1)
    first.close()
    [old] = parts(tmp_path)
    renamed = old.rename(old.with_name("offline-run-20260101_000000-" + first.run_id))
    with caplog.at_level(logging.INFO):
        second = WandbTracker("p", "e", tmp_path, {}, is_resumed=True)
        second.close()
    [older, newer] = parts(tmp_path)
    assert older == renamed
    assert second.run_id == first.run_id
    assert our_messages(caplog)[-1].endswith(f"wandb sync --id {first.run_id} {older} {newer}")


def test_wandb_dir_receives_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """WANDB_DIR moves files and changes the upload command; the id stays in the run's folder."""
    elsewhere = tmp_path / "scratch" / "logs"
    monkeypatch.setenv("WANDB_DIR", str(elsewhere))
    monkeypatch.setenv("WANDB_MODE", "offline")
    with caplog.at_level(logging.INFO):
        tracker = WandbTracker("p", "e", tmp_path / "run", {})
        tracker.close()
    [part] = parts(elsewhere)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [ID_FILE]
    assert our_messages(caplog)[-1].endswith(f"wandb sync --id {tracker.run_id} {part}")


def test_a_run_from_the_beginning_has_a_new_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a resumed run uses the stored id, and WANDB_RUN_ID always overrides it."""
    first = run_id(tmp_path, is_resumed=True)
    assert run_id(tmp_path, is_resumed=True) == first == (tmp_path / ID_FILE).read_text().strip()
    assert run_id(tmp_path, is_resumed=False) != first
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert run_id(tmp_path, is_resumed=True) == "mine"


def test_uploaded_parts_are_not_listed_again(tmp_path: Path) -> None:
    """Parts that wandb has marked as uploaded, and parts of other runs, are left out."""
    names = ("20260101_000000-a", "20260102_000000-a", "20260103_000000-b")
    done, waiting, _ = (tmp_path / "wandb" / f"offline-run-{name}" for name in names)
    for part in (done, waiting, tmp_path / "wandb" / f"offline-run-{names[2]}"):
        part.mkdir(parents=True)
    (done / "run-a.wandb.synced").touch()
    assert sync_command(tmp_path, "a") == f"wandb sync --id a {waiting}"
    (waiting / "run-a.wandb.synced").touch()
    assert sync_command(tmp_path, "a") is None
