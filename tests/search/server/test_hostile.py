"""No body keeps the server from answering others: small ones of every class, and large ones."""

import asyncio
import json
import time

import httpx
import psutil
import pytest

from search_r1.search.local_server import LocalServer
from search_r1.search.server.app import create_app
from search_r1.search.settings import ServiceConfig
from tests.search.server.engines import Watched, client
from tests.search.server.hostile import NUM_CLASSES, classes

LARGE = ServiceConfig().max_body_bytes
COSTLY = ["nested in queries", "lists in an unknown field", "ints in the body",
          "nested in an unknown field, half a character", "ints in before half a character",
          "one of same keys", "one of texts without end", "keys in half, b'1'",
          "keys in queries, b'1'", "one of objects", "too long in queries",
          "texts in queries"]  # fmt: skip
"""What took longest of 8 MB each."""


async def cost(http: httpx.AsyncClient, body: bytes) -> tuple[httpx.Response, float]:
    """The answer and the seconds that the event loop worked for it."""
    start = time.thread_time()
    answer = await http.post("/retrieve", content=body)
    return answer, time.thread_time() - start


def test_every_class_is_answered_in_a_few_words() -> None:
    """200, or one mistake: what is refused has an answer that does not grow with the request."""

    async def main() -> int:
        number = 0
        async with client(create_app(Watched(), ServiceConfig(batch_wait_ms=0))) as http:
            for name, make in classes():
                answer, seconds = await cost(http, make(20_000))
                assert answer.status_code in (200, 422), name
                assert answer.status_code == 200 or len(answer.content) < 500, name
                assert seconds < 0.5, name
                number += 1
        return number

    assert asyncio.run(main()) == NUM_CLASSES >= 290


@pytest.mark.parametrize("name", COSTLY)
def test_a_large_one_does_not_keep_others_waiting(name: str) -> None:
    """The costly classes with all the bytes that are allowed: under a second of the event loop."""
    body = dict(classes())[name](LARGE)

    async def main() -> None:
        async with client(create_app(Watched())) as http:
            answer, seconds = await cost(http, body)
            assert answer.status_code == 422
            assert seconds < 1

    asyncio.run(main())


@pytest.mark.slow
def test_all_large_ones_at_a_real_server() -> None:
    """Each class with 8 MB: its event loop works for under a second, the reading included."""
    worst: dict[str, float] = {}
    with LocalServer(["--retriever_name", "empty"]) as server, httpx.Client(timeout=60) as http:

        def worked() -> float:
            threads = psutil.Process(server.pid).threads()
            return next(one.user_time + one.system_time for one in threads if one.id == server.pid)

        for name, make in classes():
            start = worked()
            answer = http.post(f"{server.url}/retrieve", content=make(LARGE))
            assert answer.status_code in (200, 413, 422), name
            worst[name] = worked() - start
    assert len(worst) == NUM_CLASSES
    assert max(worst.values()) < 1, sorted(worst.items(), key=lambda item: -item[1])[:9]


def test_a_text_full_of_brackets_is_a_query() -> None:
    """The bound on lists and objects counts none that stand in a text, whatever it escapes."""
    text = '[{"\\' * 4000
    queries = [f"{text}{i}" for i in range(100)]
    assert sum(query.count("[{") for query in queries) * 2 > 250_000

    async def main() -> None:
        async with client(create_app(Watched(), ServiceConfig(max_query_chars=20_000))) as http:
            body = json.dumps({"queries": queries, "topk": 1}).encode()
            found = (await http.post("/retrieve", content=body)).json()["result"]
            assert [row[0]["title"] for row in found] == queries

    asyncio.run(main())
