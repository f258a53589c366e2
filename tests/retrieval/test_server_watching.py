"""The server stops if a mapped file is rewritten in place, but not if it is replaced."""

import mmap
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from search_r1.retrieval import server as retrieval_server
from search_r1.retrieval.errors import IndexMismatch


@pytest.fixture
def sigterm(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that is set by SIGTERM."""
    event = threading.Event()
    monkeypatch.setattr(retrieval_server, "WATCH_S", 0.01)
    before = signal.signal(signal.SIGTERM, lambda *_: event.set())
    yield event
    signal.signal(signal.SIGTERM, before)


def mapped(path: Path) -> mmap.mmap:
    path.write_bytes(b"a" * 9000)
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@pytest.mark.skipif(not retrieval_server.MAPS.exists(), reason="no list of mapped files")
@pytest.mark.parametrize("content", [b"b" * 9000, b"short"])
def test_a_rewrite_in_place_stops_the_server(
    tmp_path: Path, sigterm: threading.Event, content: bytes
) -> None:
    """A changed mtime or size of a mapped file sends SIGTERM; the error names the file."""
    held = mapped(tmp_path / "index 1")
    with (
        pytest.raises(IndexMismatch, match=r"index 1 was changed in place"),
        retrieval_server.watching([str(tmp_path), None]),
    ):
        (tmp_path / "index 1").write_bytes(content)
        os.utime(tmp_path / "index 1", ns=(1, 1))
        assert sigterm.wait(10)
    held.close()


def test_replaced_files_are_ignored(tmp_path: Path, sigterm: threading.Event) -> None:
    """Replacing or removing a mapped file, or changing an unmapped one, has no effect."""
    held = [mapped(tmp_path / "index"), mapped(tmp_path / "gone")]
    (tmp_path / "other").write_bytes(b"a")
    with retrieval_server.watching([str(tmp_path)]):
        (tmp_path / "new").write_bytes(b"b")
        (tmp_path / "new").replace(tmp_path / "index")
        (tmp_path / "gone").unlink()
        (tmp_path / "other").write_bytes(b"bc")
        assert not sigterm.wait(0.1)
    assert held[0][:1] == b"a"
