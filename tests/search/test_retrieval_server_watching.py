"""Mapped files that are rewritten in place end the server; renamed ones do not."""

import mmap
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from search_r1.search import retrieval_server
from search_r1.search.errors import IndexMismatch


@pytest.fixture
def asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set by SIGTERM."""
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
def test_a_rewrite_in_place_ends_the_server(
    tmp_path: Path, asked_to_stop: threading.Event, content: bytes
) -> None:
    """Another time or size of the mapped file sends SIGTERM, and its name is in the error."""
    held = mapped(tmp_path / "index 1")
    with (
        pytest.raises(IndexMismatch, match=r"index 1 was changed in place"),
        retrieval_server.watching([str(tmp_path), None]),
    ):
        (tmp_path / "index 1").write_bytes(content)
        os.utime(tmp_path / "index 1", ns=(1, 1))
        assert asked_to_stop.wait(10)
    held.close()


def test_a_new_file_in_its_place_is_none_of_ours(
    tmp_path: Path, asked_to_stop: threading.Event
) -> None:
    """A file renamed over the mapped one, its removal, and files that are not mapped are let be."""
    held = [mapped(tmp_path / "index"), mapped(tmp_path / "gone")]
    (tmp_path / "other").write_bytes(b"a")
    with retrieval_server.watching([str(tmp_path)]):
        (tmp_path / "new").write_bytes(b"b")
        (tmp_path / "new").replace(tmp_path / "index")
        (tmp_path / "gone").unlink()
        (tmp_path / "other").write_bytes(b"bc")
        assert not asked_to_stop.wait(0.1)
    assert held[0][:1] == b"a"
