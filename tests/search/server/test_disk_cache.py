"""The cache file of a server: kept across restarts, and apart for each engine."""

import asyncio
from pathlib import Path

import pytest

from search_r1.search.errors import SetupError
from search_r1.search.server.app import create_app
from search_r1.search.settings import ServiceConfig
from tests.search.server.engines import Watched, ask, client, metric


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


def test_a_file_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    """The message names the option."""
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(SetupError, match=r"--cache_path .* cannot be used"):
        create_app(Watched(), ServiceConfig(cache_path=str(tmp_path / "text")))
