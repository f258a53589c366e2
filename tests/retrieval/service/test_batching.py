"""Batches, shared queries, abandoned queries and deadlines, with a backend that can block."""

import asyncio
import random
from typing import Any

import pytest

from search_r1.retrieval.errors import CorpusError, QueryNotRecorded, UpstreamUnavailable
from search_r1.retrieval.service.app import create_app
from search_r1.retrieval.settings import ServiceConfig
from tests.retrieval.service.fake_backends import (
    FakeBackend,
    ask,
    client,
    hits_of,
    ids,
    metric,
    until,
)

WAITS_FOR_FULL_BATCH = ServiceConfig(batch_wait_ms=20_000, max_batch=8, cache_entries=0)
"""Settings with which an idle backend waits until its batch is full."""


async def block(http: Any, backend: FakeBackend) -> "asyncio.Task[Any]":
    """Block the backend in a search for the query `first`."""
    backend.gate.clear()
    task = asyncio.ensure_future(ask(http, "first"))
    await asyncio.to_thread(backend.entered.acquire)
    return task


def test_an_idle_backend_waits_for_a_full_batch() -> None:
    """Eight requests with one query each are one search for eight queries."""
    backend = FakeBackend()

    async def main() -> None:
        async with client(create_app(backend, WAITS_FOR_FULL_BATCH)) as http:
            answers = await asyncio.gather(*(ask(http, f"q{i}") for i in range(8)))
        for i, answer in enumerate(answers):
            assert ids(answer) == [[h.document.id for h in hits_of(f"q{i}", 3)]]

    asyncio.run(main())
    assert sorted(backend.calls[0][0]) == [f"q{i}" for i in range(8)]
    assert len(backend.calls) == 1


def test_queries_that_arrive_during_a_search_are_the_next_batch() -> None:
    """After a search, up to max_batch accumulated queries are searched at once."""
    backend = FakeBackend()
    app = create_app(backend, ServiceConfig(batch_wait_ms=0, max_batch=8))

    async def main() -> None:
        async with client(app) as http:
            first = await block(http, backend)
            others = [asyncio.ensure_future(ask(http, f"q{i}")) for i in range(10)]
            await until(lambda: app.state.service.batcher.num_pending == 11)
            backend.gate.set()
            await asyncio.gather(first, *others)

    asyncio.run(main())
    assert [len(queries) for queries, _ in backend.calls] == [1, 8, 2]
    assert metric(app, "retriever_batch_size_count") == 3
    assert metric(app, "retriever_batch_size_sum") == 11


def test_a_batch_has_one_k_and_serial_results() -> None:
    """Concurrent requests with random queries and topk get the same results as alone."""
    backend, generator = FakeBackend(), random.Random(3)
    requests = [
        ([f"q{generator.randrange(20)}" for _ in range(generator.randrange(4))], k)
        for k in (1, 2, 5)
        for _ in range(40)
    ]
    generator.shuffle(requests)
    config = ServiceConfig(batch_wait_ms=0, max_batch=7, cache_entries=5)

    async def main() -> None:
        async with client(create_app(backend, config)) as http:
            answers = await asyncio.gather(
                *(ask(http, *queries, topk=k) for queries, k in requests)
            )
        for (queries, k), answer in zip(requests, answers, strict=True):
            assert ids(answer) == [[h.document.id for h in hits_of(q, k)] for q in queries]

    asyncio.run(main())
    assert all(len(queries) == len(set(queries)) <= 7 for queries, _ in backend.calls)


def test_a_running_search_is_joined() -> None:
    """Ten requests join the running search for their query; one with another topk does not."""
    backend = FakeBackend()
    app = create_app(backend, ServiceConfig(batch_wait_ms=0, cache_entries=0))

    async def main() -> None:
        async with client(app) as http:
            first = await block(http, backend)
            same = [asyncio.ensure_future(ask(http, "first", "first")) for _ in range(10)]
            other = asyncio.ensure_future(ask(http, "first", topk=1))
            await until(lambda: app.state.service.batcher.num_pending == 2)
            backend.gate.set()
            answers = await asyncio.gather(first, *same)
            assert all(ids(a)[0] == ids(answers[0])[0] for a in answers)
            assert len(ids(await other)[0]) == 1

    asyncio.run(main())
    assert backend.calls == [(["first"], 3), (["first"], 1)]
    assert metric(app, 'retriever_queries_total{cache="joined"}') == 20
    assert metric(app, 'retriever_queries_total{cache="miss"}') == 2


def test_cached_results_are_not_searched_again() -> None:
    """The second request is answered from the cache, as its header says."""
    backend = FakeBackend()
    app = create_app(backend, ServiceConfig(batch_wait_ms=0))

    async def main() -> None:
        async with client(app) as http:
            first, second = await ask(http, "a", "b"), await ask(http, "b", "a")
            assert ids(first) == ids(second)[::-1]
            assert "search" not in first.headers["server-timing"]  # the fake backend has no stages
            assert "queue;dur=" in first.headers["server-timing"]
            assert second.headers["server-timing"].startswith("cache;desc=hit, total;dur=")

    asyncio.run(main())
    assert backend.calls == [(["a", "b"], 3)]
    assert metric(app, 'retriever_queries_total{cache="hit"}') == 2


def test_an_abandoned_query_is_not_searched() -> None:
    """A waiting query is dropped when all its requests are cancelled or late, and not before."""
    backend = FakeBackend()
    app = create_app(backend, ServiceConfig(batch_wait_ms=0, cache_entries=0))

    async def main() -> None:
        async with client(app) as http:
            first = await block(http, backend)
            gone = asyncio.ensure_future(ask(http, "mine", "ours"))
            late = asyncio.ensure_future(ask(http, "late", deadline_s=0.01))
            stays = asyncio.ensure_future(ask(http, "ours"))
            await until(lambda: "mine" in str(app.state.service.batcher._jobs))
            gone.cancel()
            assert (await late).status_code == 504
            await until(lambda: app.state.service.batcher.num_pending == 2)
            backend.gate.set()
            assert (await first).status_code == (await stays).status_code == 200

    asyncio.run(main())
    assert [queries for queries, _ in backend.calls] == [["first"], ["ours"]]
    assert metric(app, "retriever_dropped_queries_total") == 2


def test_a_closed_connection_drops_its_query() -> None:
    """If the client disconnects while waiting, its query is dropped and counts as 499."""
    backend = FakeBackend()
    app = create_app(backend, ServiceConfig(batch_wait_ms=0))
    sent: list[Any] = []

    async def main() -> None:
        async with client(app) as http:
            first = await block(http, backend)
            messages = [{"type": "http.request", "body": b'{"queries": ["gone"]}'}]
            messages.append({"type": "http.disconnect"})

            async def receive() -> Any:
                return messages.pop(0)

            async def send(message: Any) -> None:
                sent.append(message)

            scope = {
                "type": "http",
                "method": "POST",
                "path": "/retrieve",
                "headers": [],
                "query_string": b"",
            }
            await app(scope, receive, send)
            backend.gate.set()
            await first

    asyncio.run(main())
    assert sent == []
    assert [queries for queries, _ in backend.calls] == [["first"]]
    assert metric(app, 'retriever_requests_total{status="499"}') == 1


def test_an_error_affects_only_its_query() -> None:
    """In a batch with failing queries, all other queries are answered."""
    backend = FakeBackend(
        failures={"bad": QueryNotRecorded("not recorded"), "row": CorpusError("row")}
    )

    async def main() -> None:
        config = ServiceConfig(batch_wait_ms=20_000, max_batch=4)
        async with client(create_app(backend, config)) as http:
            queries = ("good", "bad", "row", "fine")
            answers = await asyncio.gather(*(ask(http, query) for query in queries))
            assert [a.status_code for a in answers] == [200, 424, 500, 200]
            assert answers[1].json() == {"detail": "not recorded"}

    asyncio.run(main())


@pytest.mark.parametrize(("failing", "num_calls"), [("abcdef", 3), ("ace", 7)])
def test_an_outage_is_not_detected_by_every_query(failing: str, num_calls: int) -> None:
    """After two failures in a row no more queries are sent; single failures stop nothing."""
    backend = FakeBackend(failures={query: UpstreamUnavailable("away") for query in failing})

    async def main() -> None:
        config = ServiceConfig(batch_wait_ms=20_000, max_batch=6)
        async with client(create_app(backend, config)) as http:
            answers = await asyncio.gather(*(ask(http, query) for query in "abcdef"))
            expected = [503 if query in failing else 200 for query in "abcdef"]
            assert [answer.status_code for answer in answers] == expected
            assert len(backend.calls) == num_calls

    asyncio.run(main())


def test_an_unexpected_error_is_a_500_for_its_query(caplog: pytest.LogCaptureFixture) -> None:
    """A bug in a backend neither stops the service nor affects other queries of the batch."""
    backend = FakeBackend(failures={"bug": RuntimeError("index out of range")})

    async def main() -> None:
        config = ServiceConfig(batch_wait_ms=20_000, max_batch=2)
        async with client(create_app(backend, config)) as http:
            answer, fine = await asyncio.gather(ask(http, "bug"), ask(http, "fine"))
            assert (answer.status_code, fine.status_code) == (500, 200)
            assert "index out of range" in answer.json()["detail"]

    asyncio.run(main())
    assert "failed unexpectedly" in caplog.text


def test_a_backend_with_threads_uses_all_of_them() -> None:
    """Eight queries with four free threads are four concurrent searches for two queries."""
    backend = FakeBackend(num_threads=4)
    backend.gate.clear()

    async def main() -> None:
        async with client(create_app(backend, WAITS_FOR_FULL_BATCH)) as http:
            answer = asyncio.ensure_future(ask(http, *(f"q{i}" for i in range(8))))
            for _ in range(4):
                await asyncio.to_thread(backend.entered.acquire)
            backend.gate.set()
            assert len(ids(await answer)) == 8

    asyncio.run(main())
    assert [len(queries) for queries, _ in backend.calls] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("entries", "limit", "num_cached"),
    [(3, 10**9, 3), (100, 5_000, 3), (100, 0, 0), (0, 10**9, 0), (100, 10**9, 10)],
)
def test_the_cache_is_limited_in_entries_and_bytes(
    entries: int, limit: int, num_cached: int
) -> None:
    """The most recently used results are kept; the length of the query counts as well."""
    backend = FakeBackend()
    config = ServiceConfig(batch_wait_ms=0, cache_entries=entries, cache_bytes=limit)

    async def main() -> None:
        async with client(create_app(backend, config)) as http:
            for query in "abcdefghij":
                await ask(http, query, topk=2)
            del backend.calls[:]
            for query in "jihgfedcba"[:num_cached]:
                await ask(http, query, topk=2)
            assert backend.calls == []
            await ask(http, "x" * 9000, topk=1)
            await ask(http, "x" * 9000, topk=1)
            assert len(backend.calls) == (2 if limit < 9000 or not entries else 1)

    asyncio.run(main())
