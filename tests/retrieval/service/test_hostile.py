"""No request body can block the server for others: small ones of every class, and large ones."""

import asyncio
import json
import time

import httpx
import psutil
import pytest

from search_r1.retrieval.local_server import LocalServer
from search_r1.retrieval.service.app import create_app
from search_r1.retrieval.settings import ServiceConfig
from tests.retrieval.service.fake_backends import FakeBackend, client
from tests.retrieval.service.hostile import NUM_CLASSES, classes

LARGE = ServiceConfig().max_body_bytes
COSTLY = ["nested in queries", "lists in an unknown field", "ints in the body",
          "nested in an unknown field, half a character", "ints in before half a character",
          "one of same keys", "one of texts without end", "keys in half, b'1'",
          "keys in queries, b'1'", "one of objects", "too long in queries",
          "texts in queries"]  # fmt: skip
"""The classes that took longest with 8 MB."""


async def cost(http: httpx.AsyncClient, body: bytes) -> tuple[httpx.Response, float]:
    """Return the response and the CPU seconds of the event loop."""
    start = time.thread_time()
    answer = await http.post("/retrieve", content=body)
    return answer, time.thread_time() - start


def test_every_class_has_a_short_response() -> None:
    """A refusal reports one error; its length does not grow with the request."""

    async def main() -> int:
        number = 0
        async with client(create_app(FakeBackend(), ServiceConfig(batch_wait_ms=0))) as http:
            for name, make in classes():
                answer, seconds = await cost(http, make(20_000))
                assert answer.status_code in (200, 422), name
                assert answer.status_code == 200 or len(answer.content) < 500, name
                assert seconds < 0.5, name
                number += 1
        return number

    assert asyncio.run(main()) == NUM_CLASSES >= 290


@pytest.mark.parametrize("name", COSTLY)
def test_a_large_body_does_not_block_others(name: str) -> None:
    """The costly classes at the size limit take less than a second of the event loop."""
    body = dict(classes())[name](LARGE)

    async def main() -> None:
        async with client(create_app(FakeBackend())) as http:
            answer, seconds = await cost(http, body)
            assert answer.status_code == 422
            assert seconds < 1

    asyncio.run(main())


@pytest.mark.slow
def test_all_large_bodies_at_a_real_server() -> None:
    """Each class with 8 MB takes less than a second of the event loop, including the reading."""
    worst: dict[str, float] = {}
    with LocalServer(["--retriever_name", "empty"]) as server, httpx.Client(timeout=60) as http:

        def cpu_seconds() -> float:
            threads = psutil.Process(server.pid).threads()
            return next(t.user_time + t.system_time for t in threads if t.id == server.pid)

        for name, make in classes():
            start = cpu_seconds()
            answer = http.post(f"{server.url}/retrieve", content=make(LARGE))
            assert answer.status_code in (200, 413, 422), name
            worst[name] = cpu_seconds() - start
    assert len(worst) == NUM_CLASSES
    assert max(worst.values()) < 1, sorted(worst.items(), key=lambda item: -item[1])[:9]


def test_a_string_full_of_brackets_is_a_query() -> None:
    """The limit on lists and objects does not count those inside strings, even with escapes."""
    text = '[{"\\' * 4000
    queries = [f"{text}{i}" for i in range(100)]
    assert sum(query.count("[{") for query in queries) * 2 > 250_000

    async def main() -> None:
        async with client(create_app(FakeBackend(), ServiceConfig(max_query_chars=20_000))) as http:
            body = json.dumps({"queries": queries, "topk": 1}).encode()
            results = (await http.post("/retrieve", content=body)).json()["result"]
            assert [row[0]["title"] for row in results] == queries

    asyncio.run(main())
