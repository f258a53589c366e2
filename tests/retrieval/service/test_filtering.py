"""The `filter` of a request: through the server, its mistakes, and what is cached."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.service.app import create_app
from search_r1.retrieval.settings import RetrieverConfig, ServiceConfig
from tests.retrieval.service.fake_backends import FakeBackend, client, metric
from tests.retrieval.with_fields import FILTERS, NAMES, QUERIES, best_left, write_with_fields

HITS, MISSES = (f'retriever_queries_total{{cache="{how}"}}' for how in ("hit", "miss"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The rows of a corpus with fields, and a BM25 engine over it."""
    folder = tmp_path_factory.mktemp("fields")
    rows = write_with_fields(folder / "corpus.jsonl")
    path = str(folder / "corpus.jsonl")
    build_index(BuildConfig("bm25", path, str(folder / "index"), filter_fields=NAMES))
    return rows, build_retriever(RetrieverConfig("bm25", path, str(folder / "index")))


async def ask(http: Any, **fields: Any) -> Any:
    body = {"queries": QUERIES, "topk": 4} | fields
    return await http.post("/retrieve", json=body)


@pytest.mark.parametrize("is_kept", [False, True])
def test_filters_of_one_batch_do_not_mix(world: Any, is_kept: bool, tmp_path: Path) -> None:
    """Requests with every filter, and without, asked at once and again from the cache."""
    rows, engine = world
    kept = {"cache_path": str(tmp_path / "kept.sqlite")} if is_kept else {}
    asked = [{}, *FILTERS]

    async def main() -> None:
        app = create_app(engine, ServiceConfig(**kept))
        async with client(app) as http:
            for _ in range(2):
                answers = await asyncio.gather(*(ask(http, filter=value) for value in asked))
                for value, answer in zip(asked, answers, strict=True):
                    ids = [[d["id"] for d in hits] for hits in answer.json()["result"]]
                    expected = best_left(engine, rows, value, 4)
                    assert ids == [[hit.document.id for hit in hits] for hits in expected], value
            assert metric(app, HITS) == len(asked) * len(QUERIES)
            same = await ask(http, filter={"year": [1994, 7, 1990, 1993]})  # as the second filter
            assert "cache" in same.headers["Server-Timing"]
            assert (await http.get("/info")).json()["filter_fields"] == list(NAMES)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("filter", "location", "allowed"),
    [
        ({"yaer": 1990}, "yaer", "did you mean year?"),
        ({"year": 1990, "language": "en"}, "language", "year, tags, source, checked"),
        ({"year": []}, "year", "1 to 1000"),
        ({"year": list(range(1001))}, "year", "1 to 1000"),
        ({"year": None}, "year", "expected text"),
        ({"tags": [["red"]]}, "tags", "expected text"),
        ({"year": {"gt": 1990}}, "year", "expected text"),
        ("year", None, "expected an object"),
    ],
)
def test_a_wrong_filter_is_refused(world: Any, filter: Any, location: str, allowed: str) -> None:
    """Before anything is searched, with the field and what may be there."""

    async def main() -> None:
        app = create_app(world[1])
        async with client(app) as http:
            answer = await ask(http, filter=filter)
            [detail] = answer.json()["detail"]
            assert answer.status_code == 422 and allowed in detail["msg"]
            assert detail["loc"] == ["body", "filter", *([location] if location else [])]
            assert metric(app, MISSES) == 0

    asyncio.run(main())


@pytest.mark.parametrize("empty", [None, {}, []])
def test_an_engine_without_fields(empty: Any) -> None:
    """It refuses a filter, and answers as before where the filter is empty."""
    backend = FakeBackend()

    async def main() -> None:
        async with client(create_app(backend)) as http:
            answer = await ask(http, filter={"year": 1990})
            assert answer.status_code == 422 and backend.calls == []
            assert "--filter_fields" in answer.json()["detail"][0]["msg"]
            assert (await ask(http, filter=empty)).status_code == 200

    asyncio.run(main())
