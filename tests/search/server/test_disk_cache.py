"""The cache file: exact, kept across restarts, apart for each engine, and never trusted blindly."""

import asyncio
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.search.errors import SetupError
from search_r1.search.schema import Document, Hit
from search_r1.search.server.app import create_app
from search_r1.search.server.config import ServiceConfig
from search_r1.search.server.disk_cache import DiskCache
from tests.search.server.engines import Watched, ask, client, hits_of, metric

TEXT = st.text(st.characters(exclude_categories=()), max_size=8)
"""Lone surrogates included."""
HITS = st.lists(st.builds(Hit, st.builds(Document, TEXT, TEXT, TEXT, TEXT), st.floats()))


@given(query=st.text(max_size=8), hits=HITS)
def test_what_is_read_is_what_was_written(
    query: str, hits: list[Hit], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Documents and scores come back bit for bit, whatever the text and the number."""
    cache = DiskCache(tmp_path_factory.mktemp("cache") / "c.sqlite", "f", "e")
    cache.put({query: hits}, 3)
    assert repr(cache.get([query, query + "x"], 3)) == repr({query: hits})
    assert cache.get([query], 4) == {}
    cache.close()


def test_many_queries_at_once(tmp_path: Path) -> None:
    """More queries than one statement takes are all found."""
    cache = DiskCache(tmp_path / "c.sqlite", "f", "e")
    kept = {f"q{i}": hits_of(f"q{i}", 1) for i in range(1200)}
    cache.put(kept, 1)
    assert cache.get(list(kept), 1) == kept


def test_a_restart_finds_the_results_and_another_engine_does_not(tmp_path: Path) -> None:
    """The same engine is not asked again, one with other facts is; the body stays the same."""
    config = ServiceConfig(cache_path=str(tmp_path / "c.sqlite"), cache_entries=0)
    bodies, engines = [], [Watched(), Watched(), Watched()]
    engines[2].facts = {"engine": "watched", "nprobe": 8}
    for engine in engines:
        app = create_app(engine, config)

        async def main(app: object = app) -> None:
            async with client(app) as http:
                bodies.append((await ask(http, "a", "ü", return_scores=True)).content)

        asyncio.run(main())
        assert app.state.service.close()
        found = 2 - len(engine.calls) * 2
        assert metric(app, "retriever_cache_file_hits_total") == found
    assert [len(engine.calls) for engine in engines] == [1, 0, 1]
    assert len(set(bodies)) == 1


def test_two_servers_share_a_file(tmp_path: Path) -> None:
    """What one wrote the other reads."""
    one, two = (DiskCache(tmp_path / "c.sqlite", "f", "e") for _ in range(2))
    one.put({"a": hits_of("a", 1)}, 1)
    two.put({"b": hits_of("b", 1)}, 1)
    assert set(one.get(["a", "b"], 1)) == set(two.get(["a", "b"], 1)) == {"a", "b"}


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    """A file that is no cache of ours is named at the start, and left as it is."""
    damaged, foreign = tmp_path / "damaged", tmp_path / "foreign"
    damaged.write_bytes(b"SQLite format 3\x00" + bytes(range(256)) * 40)
    text = tmp_path / "text"
    text.write_text("no database " * 100)
    with sqlite3.connect(foreign) as other:
        other.execute("CREATE TABLE results (a)")
    for path in (damaged, text, foreign, tmp_path / "missing" / "c.sqlite"):
        before = path.read_bytes() if path.exists() else None
        with pytest.raises(SetupError, match=r"--cache_path .* cannot be used"):
            DiskCache(path, "f", "e")
        assert (path.read_bytes() if path.exists() else None) == before


def test_a_file_that_fails_later_is_only_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost table is a warning, once, and the engine answers."""
    path = tmp_path / "c.sqlite"
    cache = DiskCache(path, "f", "e")
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE results")
    assert cache.get(["a"], 1) == {}
    cache.put({"a": []}, 1)
    assert [r.levelname for r in caplog.records] == ["WARNING"]
