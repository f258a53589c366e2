"""wandb without network: nothing fails, nothing hangs, nothing is lost."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.ext.trackers import wandb as wandb_tracker
from verl.ext.trackers.wandb import WandbTracker
from verl.monitor.tracking import TrackedRun

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


def tracker_in(folder: Path, is_resumed: bool = False) -> WandbTracker:
    folder.mkdir(parents=True, exist_ok=True)
    return WandbTracker(TrackedRun("p", "e", folder, {"seed": 1}, is_resumed))


def parts(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def stored(folder: Path) -> str:
    return (folder / "wandb_run_id").read_text().strip()


def glob_of(message: str) -> list[Path]:
    """Return the folders that a shell would give to the command at the end of a message."""
    pattern = Path(message.split()[-1])
    return sorted(pattern.parent.glob(pattern.name))


def our_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of our tracker, without wandb's own."""
    return [r.getMessage() for r in caplog.records if r.name == "verl.ext.trackers.wandb"]


def test_no_key_means_offline_with_the_command_to_upload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an account the run continues offline; the upload command is logged at the end."""
    out = tmp_path / "run"
    with caplog.at_level(logging.INFO):
        tracker = tracker_in(out)
        tracker.log({"loss": 0.512}, 1)
        tracker.log({"loss": 0.256}, 2)
        tracker.close()
    wandb.teardown()  # its service, which may answer before the file has everything, ends with it
    [part] = parts(out)
    written = next(part.glob("run-*.wandb")).read_bytes()
    assert written.index(b"0.512") < written.index(b"0.256")
    [message] = our_messages(caplog)
    assert glob_of(message) == [part] and part.name.endswith(stored(out))


def test_a_server_out_of_reach_means_offline(
    tmp_path: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an account but without network, the run neither fails nor waits for the server."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setattr(wandb_tracker, "INIT_S", 1)
    tracker = tracker_in(tmp_path)
    tracker.close()
    assert len(parts(tmp_path)) == 1


def test_wandb_mode_is_not_overridden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """WANDB_MODE=disabled writes nothing, and neither key nor network is checked."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with caplog.at_level(logging.INFO):
        tracker = tracker_in(tmp_path)
        tracker.log({"loss": 1.0}, 1)
        tracker.close()
    assert our_messages(caplog) == []
    assert parts(tmp_path) == []


def test_a_resumed_run_continues_the_same_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both parts have one id, and one command uploads both, the older first."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    first = tracker_in(tmp_path)
    first.log({"loss": 1.0}, 1)
    first.close()
    [old] = parts(tmp_path)
    renamed = old.rename(old.with_name("offline-run-20260101_000000-" + stored(tmp_path)))
    with caplog.at_level(logging.INFO):
        second = tracker_in(tmp_path, is_resumed=True)
        second.close()
    [older, newer] = parts(tmp_path)
    assert older == renamed
    assert glob_of(our_messages(caplog)[-1]) == [older, newer]


def test_wandb_dir_receives_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """WANDB_DIR moves files and changes the upload command; the id stays in the run's folder."""
    elsewhere = tmp_path / "scratch" / "logs"
    monkeypatch.setenv("WANDB_DIR", str(elsewhere))
    monkeypatch.setenv("WANDB_MODE", "offline")
    with caplog.at_level(logging.INFO):
        tracker = tracker_in(tmp_path / "run")
        tracker.close()
    [part] = parts(elsewhere)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["wandb_run_id"]
    assert glob_of(our_messages(caplog)[-1]) == [part]
