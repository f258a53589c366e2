"""The cache file of a server: kept across restarts, with separate results for each backend."""

import asyncio
from pathlib import Path

import pytest

from search_r1.retrieval.service.app import create_app
from search_r1.retrieval.settings import ServiceConfig
from search_r1.store import StorageError
from tests.retrieval.service.fake_backends import FakeBackend, ask, client, metric


def test_results_are_kept_across_restarts_for_one_backend(tmp_path: Path) -> None:
    """The same backend is not called again, one with other facts is; the body stays the same."""
    config = ServiceConfig(cache_path=str(tmp_path / "c.sqlite"), cache_entries=0)
    bodies, backends = [], [FakeBackend(), FakeBackend(), FakeBackend()]
    backends[2].facts = {"engine": "fake", "nprobe": 8}
    for backend in backends:
        app = create_app(backend, config)

        async def main(app: object = app) -> None:
            async with client(app) as http:
                bodies.append((await ask(http, "a", "ü", return_scores=True)).content)

        asyncio.run(main())
        assert app.state.service.close()
        num_hits = 2 - len(backend.calls) * 2
        assert metric(app, "retriever_cache_file_hits_total") == num_hits
    assert [len(backend.calls) for backend in backends] == [1, 0, 1]
    assert len(set(bodies)) == 1


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    """The message names the option."""
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(StorageError, match="--cache_path"):
        create_app(FakeBackend(), ServiceConfig(cache_path=str(tmp_path / "text")))
