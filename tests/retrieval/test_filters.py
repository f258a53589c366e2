"""Filters from a client's side: what a server gets, whom it may ask, and a tool that filters."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from search_r1.agent.search import SearchTool
from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import RetrieverRefused
from search_r1.retrieval.filters import FilteredRetrieval
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.service.app import create_app
from search_r1.retrieval.settings import RetrieverConfig
from tests.apps import running
from tests.retrieval.with_fields import FILTERS, NAMES, QUERIES, best_left, write_with_fields
from verl.config import Config
from verl.plugins import resolve
from verl.types import Prompt, Trajectory

YEAR_SEARCH = Path(__file__).resolve().parents[2] / "example/tools/filtered_search.py"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The rows of a corpus with fields, a BM25 engine over it, and its server's address."""
    folder = tmp_path_factory.mktemp("fields")
    rows = write_with_fields(folder / "corpus.jsonl")
    path = str(folder / "corpus.jsonl")
    build_index(BuildConfig("bm25", path, str(folder / "index"), filter_fields=NAMES))
    engine = build_retriever(RetrieverConfig("bm25", path, str(folder / "index")))
    with running(create_app(engine, find=engine.corpus.find)) as url:
        yield rows, engine, url


def test_searches_with_every_filter_at_once(world: Any) -> None:
    """Each gets what its own filter leaves, though they are merged by their queries."""
    rows, engine, url = world
    asked = [None, {}, *FILTERS]

    async def main() -> None:
        async with RetrievalClient(url, 4) as client:
            found = await asyncio.gather(*(client.search(q, f) for f in asked for q in QUERIES))
            narrow = FilteredRetrieval(client, FILTERS[0])
            assert await narrow.search(QUERIES[0]) == found[2 * len(QUERIES)]
            assert await narrow.document("d0") == engine.corpus[0]
        expected = [hits for f in asked for hits in best_left(engine, rows, f or {}, 4)]
        assert found == [[hit.document for hit in hits] for hits in expected]

    asyncio.run(main())


def unfiltered(path: Path) -> Any:
    path.write_text(json.dumps({"id": "a", "contents": "river"}))
    return build_retriever(RetrieverConfig("bm25", str(path)))


def test_a_server_without_the_field_gets_no_search(
    world: Any, tmp_path: Path, serve: Callable[..., Any]
) -> None:
    """It would ignore the filter, or refuse a batch; searches without a filter go on."""

    async def main(url: str) -> None:
        async with RetrievalClient(url) as client:
            for _ in range(2):
                with pytest.raises(RetrieverRefused) as refused:
                    await client.search("river", {"yaer": 1990})
                assert refused.value.status == 422 and "yaer" in str(refused.value)
            assert await client.search("river")

    asyncio.run(main(world[2]))
    with serve(create_app(unfiltered(tmp_path / "corpus.jsonl"))) as url:
        asyncio.run(main(url))


def test_a_tool_whose_calls_name_a_year(world: Any) -> None:
    """Only that call is filtered, and the dialogue counts all."""
    rows, engine, url = world
    config = Config()
    config.retriever.url, config.retriever.topk = url, 4
    start = Trajectory(Prompt("q", (1,), "", ("x",)), [])

    async def main() -> None:
        built: SearchTool = resolve("agent.tools", f"{YEAR_SEARCH}:YearSearch", {})(config)
        tool = built.for_dialogue(start)
        for year, value in ((1990, {"year": 1990}), (None, {})):
            seen = await tool.call(query=QUERIES[0], year=year)
            expected = best_left(engine, rows, value, 4)[0]
            assert [item.id for item in seen.items] == [hit.document.id for hit in expected]
        assert tool.seen is not None and tool.seen["searches"] == 2
        await tool.aclose()

    asyncio.run(main())
