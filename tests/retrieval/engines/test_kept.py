"""A backend whose results are kept in a file: what is asked of it, and what is read back."""

import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.retrieval.engines.base import collect
from search_r1.retrieval.engines.kept import KeepingRetriever, read_value, result_keys, to_value
from search_r1.retrieval.schema import Document, Hit
from search_r1.store import FileStore
from tests.retrieval.service.fake_backends import FakeBackend, hits_of


def test_asks_the_backend_for_what_is_missing(tmp_path: Path) -> None:
    """Found and new results come in the order of the queries; each query and k is kept once."""
    backend, counts = FakeBackend(), list[int]()
    for _ in range(2):
        store = FileStore(tmp_path / "s", "--cache_path")
        kept = KeepingRetriever(backend, store, counts.append)
        assert kept.search(["b", "a"], 2) == [hits_of("b", 2), hits_of("a", 2)]
        with collect() as seconds:
            assert kept.search(["c", "a"], 2) == [hits_of("c", 2), hits_of("a", 2)]
        assert kept.search(["a"], 3) == [hits_of("a", 3)] and "cache_file" in seconds
        keys = result_keys(store)
        store.close()
    assert backend.calls == [(["b", "a"], 2), (["c"], 2), (["a"], 3)]
    assert counts == [0, 1, 0, 2, 2, 1] and len(keys) == 4


def test_an_error_of_the_backend_keeps_nothing(tmp_path: Path) -> None:
    """The error passes through, and the next search asks the backend again."""
    backend = FakeBackend(failures={"bad": ValueError("no")})
    kept = KeepingRetriever(backend, FileStore(tmp_path / "s", ""), lambda count: None)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            kept.search(["a", "bad"], 1)
    assert len(backend.calls) == 2


@given(st.floats(), st.floats(allow_nan=False), st.text(st.characters(exclude_categories=())))
def test_numbers_and_text_are_exact(score: float, seconds: float, text: str) -> None:
    """Scores keep their bits (any NaN is NaN), and text and unusual titles are unchanged."""
    store = FileStore(":memory:", "")
    document = Document("7", "another title", text, "no first line")
    store.put({("f", "n", 1, text): to_value([Hit(document, score)], seconds)})
    ((hit,), read_seconds) = read_value(store.get([("f", "n", 1, text)])[("f", "n", 1, text)])
    assert hit.document == document and read_seconds == seconds
    store.close()
    if math.isnan(score):
        assert math.isnan(hit.score)
    else:
        assert struct.pack("d", hit.score) == struct.pack("d", score)
