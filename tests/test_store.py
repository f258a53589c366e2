"""The store: exact values, shared files, restarts, and damaged or foreign files."""

import sqlite3
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.store import FileStore, StorageError

TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
"""Lone surrogates included."""
VALUES = st.lists(st.one_of(TEXT, st.floats(), st.integers()))


@given(name=TEXT, value=VALUES)
def test_values_are_read_back_exactly(
    name: str, value: list[object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A reopened file returns strings and numbers exactly, and only for their key."""
    path = tmp_path_factory.mktemp("store") / "s"
    store = FileStore(path, "--option")
    store.put({("s", 3, name): value})
    store.close()
    store = FileStore(path, "--option")
    keys = [("s", 3, name), ("s", 3, name + "x"), ("s", 4, name), ("t", 3, name)]
    assert repr(store.get(keys)) == repr({keys[0]: value})
    store.close()


def test_many_keys_at_once(tmp_path: Path) -> None:
    """More keys than one SELECT can take are all found."""
    store = FileStore(tmp_path / "s", "--option")
    values = {(f"q{i}", i): [i] for i in range(1200)}
    store.put(values)
    assert store.get(list(values)) == values
    assert set(store.list_keys()) == values.keys()


def test_several_threads_and_stores_share_a_file(tmp_path: Path) -> None:
    """Two stores of one file, written by eight threads, share their values."""
    stores = [FileStore(tmp_path / "s", "--option") for _ in range(2)]

    def fill(number: int) -> None:
        for i in range(20):
            stores[number % 2].put({(number, i): number})

    threads = [threading.Thread(target=fill, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys = [(number, i) for number in range(8) for i in range(20)]
    assert all(store.get(keys) == {key: key[0] for key in keys} for store in stores)


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    """A file that is not one of our stores is refused with its path and left unchanged."""
    damaged, foreign = tmp_path / "damaged", tmp_path / "foreign"
    damaged.write_bytes(b"SQLite format 3\x00" + bytes(range(256)) * 40)
    text = tmp_path / "text"
    text.write_text("no database " * 100)
    short = tmp_path / "short"
    short.write_text("a")  # which sqlite treats as empty
    with sqlite3.connect(foreign) as other:
        other.execute("CREATE TABLE results (a)")
    for path in (damaged, text, short, foreign, tmp_path / "missing" / "s"):
        before = path.read_bytes() if path.exists() else None
        with pytest.raises(StorageError, match="--option"):
            FileStore(path, "--option")
        assert (path.read_bytes() if path.exists() else None) == before


def test_a_file_that_fails_later_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost table is one warning; then reads find nothing and writes do nothing."""
    path = tmp_path / "s"
    store = FileStore(path, "--option")
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE entries")
    assert store.get([("a",)]) == {} and store.list_keys() == []
    store.put({("a",): []})
    assert [r.levelname for r in caplog.records] == ["WARNING"]
