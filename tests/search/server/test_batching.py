"""Batches, queries in flight, abandoned queries, deadlines: over an engine that can be held."""

import asyncio
import gc
import random
from pathlib import Path
from typing import Any

import pytest

from search_r1.search.errors import CorpusError, QueryNotRecorded, UpstreamUnavailable
from search_r1.search.recording import Recorder, read_rows, to_record
from search_r1.search.server.app import create_app
from search_r1.search.settings import ServiceConfig
from tests.search.server.engines import Watched, ask, client, hits_of, ids, metric, until

PATIENT = ServiceConfig(batch_wait_ms=20_000, max_batch=8, cache_entries=0)
"""An idle engine waits until its batch is full."""


async def hold(http: Any, engine: Watched) -> "asyncio.Task[Any]":
    """Make the engine busy with the query `first`."""
    engine.gate.clear()
    task = asyncio.ensure_future(ask(http, "first"))
    await asyncio.to_thread(engine.entered.acquire)
    return task


def test_an_idle_engine_waits_for_a_full_batch() -> None:
    """Eight requests of one query each become one search of eight."""
    engine = Watched()

    async def main() -> None:
        async with client(create_app(engine, PATIENT)) as http:
            answers = await asyncio.gather(*(ask(http, f"q{i}") for i in range(8)))
        for i, answer in enumerate(answers):
            assert ids(answer) == [[h.document.id for h in hits_of(f"q{i}", 3)]]

    asyncio.run(main())
    assert sorted(engine.calls[0][0]) == [f"q{i}" for i in range(8)]
    assert len(engine.calls) == 1


def test_what_arrives_while_the_engine_is_busy_is_the_next_batch() -> None:
    """No wait after a search: the accumulated queries go at once, at most max_batch of them."""
    engine = Watched()
    app = create_app(engine, ServiceConfig(batch_wait_ms=0, max_batch=8))

    async def main() -> None:
        async with client(app) as http:
            first = await hold(http, engine)
            others = [asyncio.ensure_future(ask(http, f"q{i}")) for i in range(10)]
            await until(lambda: app.state.service.batcher.num_pending == 11)
            engine.gate.set()
            await asyncio.gather(first, *others)

    asyncio.run(main())
    assert [len(queries) for queries, _ in engine.calls] == [1, 8, 2]
    assert metric(app, "retriever_batch_size_count") == 3
    assert metric(app, "retriever_batch_size_sum") == 11


def test_a_batch_has_one_k_and_answers_equal_serial_ones() -> None:
    """Requests with random queries and topk, all at once, get what each gets alone."""
    engine, generator = Watched(), random.Random(3)
    asked = [
        ([f"q{generator.randrange(20)}" for _ in range(generator.randrange(4))], k)
        for k in (1, 2, 5)
        for _ in range(40)
    ]
    generator.shuffle(asked)
    config = ServiceConfig(batch_wait_ms=0, max_batch=7, cache_entries=5)

    async def main() -> None:
        async with client(create_app(engine, config)) as http:
            answers = await asyncio.gather(*(ask(http, *queries, topk=k) for queries, k in asked))
        for (queries, k), answer in zip(asked, answers, strict=True):
            assert ids(answer) == [[h.document.id for h in hits_of(q, k)] for q in queries]

    asyncio.run(main())
    assert all(len(queries) == len(set(queries)) <= 7 for queries, _ in engine.calls)


def test_equal_queries_in_flight_are_searched_once() -> None:
    """Ten requests for a query that is being searched join it; another topk does not."""
    engine = Watched()
    app = create_app(engine, ServiceConfig(batch_wait_ms=0, cache_entries=0))

    async def main() -> None:
        async with client(app) as http:
            first = await hold(http, engine)
            same = [asyncio.ensure_future(ask(http, "first", "first")) for _ in range(10)]
            other = asyncio.ensure_future(ask(http, "first", topk=1))
            await until(lambda: app.state.service.batcher.num_pending == 2)
            engine.gate.set()
            answers = await asyncio.gather(first, *same)
            assert all(ids(a)[0] == ids(answers[0])[0] for a in answers)
            assert len(ids(await other)[0]) == 1

    asyncio.run(main())
    assert engine.calls == [(["first"], 3), (["first"], 1)]
    assert metric(app, 'retriever_queries_total{cache="joined"}') == 20
    assert metric(app, 'retriever_queries_total{cache="miss"}') == 2


def test_results_in_memory_are_not_searched_again() -> None:
    """The second request is answered by the cache, which the header says."""
    engine = Watched()
    app = create_app(engine, ServiceConfig(batch_wait_ms=0))

    async def main() -> None:
        async with client(app) as http:
            first, second = await ask(http, "a", "b"), await ask(http, "b", "a")
            assert ids(first) == ids(second)[::-1]
            assert "search" not in first.headers["server-timing"]  # the engine has no stages
            assert "queue;dur=" in first.headers["server-timing"]
            assert second.headers["server-timing"].startswith("cache;desc=hit, total;dur=")

    asyncio.run(main())
    assert engine.calls == [(["a", "b"], 3)]
    assert metric(app, 'retriever_queries_total{cache="hit"}') == 2


def test_an_abandoned_query_is_not_searched() -> None:
    """A waiting query whose requests are cancelled or late is dropped; a shared one is not."""
    engine = Watched()
    app = create_app(engine, ServiceConfig(batch_wait_ms=0, cache_entries=0))

    async def main() -> None:
        async with client(app) as http:
            first = await hold(http, engine)
            gone = asyncio.ensure_future(ask(http, "mine", "ours"))
            late = asyncio.ensure_future(ask(http, "late", deadline_s=0.01))
            stays = asyncio.ensure_future(ask(http, "ours"))
            await until(lambda: "mine" in str(app.state.service.batcher._in_flight))
            gone.cancel()
            assert (await late).status_code == 504
            await until(lambda: app.state.service.batcher.num_pending == 2)
            engine.gate.set()
            assert (await first).status_code == (await stays).status_code == 200

    asyncio.run(main())
    assert [queries for queries, _ in engine.calls] == [["first"], ["ours"]]
    assert metric(app, "retriever_dropped_queries_total") == 2


def test_a_closed_connection_gives_its_query_up() -> None:
    """A disconnect while waiting drops the query and counts as 499."""
    engine = Watched()
    app = create_app(engine, ServiceConfig(batch_wait_ms=0))
    sent: list[Any] = []

    async def main() -> None:
        async with client(app) as http:
            first = await hold(http, engine)
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
            engine.gate.set()
            await first

    asyncio.run(main())
    assert sent == []
    assert [queries for queries, _ in engine.calls] == [["first"]]
    assert metric(app, 'retriever_requests_total{status="499"}') == 1


def test_an_error_reaches_only_its_query() -> None:
    """In a batch with a bad query the neighbours are answered; the next request is, too."""
    engine = Watched(failures={"bad": QueryNotRecorded("not recorded"), "row": CorpusError("row")})

    async def main() -> None:
        config = ServiceConfig(batch_wait_ms=20_000, max_batch=4)
        async with client(create_app(engine, config)) as http:
            asked = ("good", "bad", "row", "fine")
            answers = await asyncio.gather(*(ask(http, query) for query in asked))
            assert [a.status_code for a in answers] == [200, 424, 500, 200]
            assert answers[1].json() == {"detail": "not recorded"}

    asyncio.run(main())


@pytest.mark.parametrize(("wrong", "num_calls"), [("abcdef", 3), ("ace", 7)])
def test_an_outage_is_not_found_out_by_every_query(wrong: str, num_calls: int) -> None:
    """Each would spend all its retries; queries that fail alone leave the others their answers."""
    engine = Watched(failures={query: UpstreamUnavailable("away") for query in wrong})

    async def main() -> None:
        config = ServiceConfig(batch_wait_ms=20_000, max_batch=6)
        async with client(create_app(engine, config)) as http:
            answers = await asyncio.gather(*(ask(http, query) for query in "abcdef"))
            expected = [503 if query in wrong else 200 for query in "abcdef"]
            assert [answer.status_code for answer in answers] == expected
            assert len(engine.calls) == num_calls

    asyncio.run(main())


def test_an_unexpected_error_is_a_500_for_its_query(caplog: pytest.LogCaptureFixture) -> None:
    """A bug in an engine neither stops the service nor reaches the others of its batch."""
    engine = Watched(failures={"bug": RuntimeError("index out of range")})

    async def main() -> None:
        config = ServiceConfig(batch_wait_ms=20_000, max_batch=2)
        async with client(create_app(engine, config)) as http:
            answer, fine = await asyncio.gather(ask(http, "bug"), ask(http, "fine"))
            assert (answer.status_code, fine.status_code) == (500, 200)
            assert "index out of range" in answer.json()["detail"]

    asyncio.run(main())
    assert "failed unexpectedly" in caplog.text


def test_an_engine_with_threads_searches_in_all_of_them() -> None:
    """Eight queries for four free threads are four searches of two, at the same time."""
    engine = Watched(num_threads=4)
    engine.gate.clear()

    async def main() -> None:
        async with client(create_app(engine, PATIENT)) as http:
            answer = asyncio.ensure_future(ask(http, *(f"q{i}" for i in range(8))))
            for _ in range(4):
                await asyncio.to_thread(engine.entered.acquire)
            engine.gate.set()
            assert len(ids(await answer)) == 8

    asyncio.run(main())
    assert [len(queries) for queries, _ in engine.calls] == [2, 2, 2, 2]


def test_results_are_written_down_once_each(tmp_path: Path) -> None:
    """The recorder gets every search with its seconds, and a cached answer not again."""
    path, engine = tmp_path / "record.jsonl", Watched()
    app = create_app(engine, recorder=Recorder(path, engine.info()))

    async def main() -> None:
        async with client(app) as http:
            await ask(http, "a", "b", topk=2)
            await ask(http, "a", topk=2)

    asyncio.run(main())
    assert app.state.service.close()
    records = [to_record(row) for _, row in read_rows(path)]
    assert [(r.query, r.k, r.hits) for r in records] == [(q, 2, hits_of(q, 2)) for q in "ab"]
    assert all(r.seconds > 0 for r in records)


@pytest.mark.parametrize(
    ("entries", "limit", "kept"),
    [(3, 10**9, 3), (100, 5_000, 3), (100, 0, 0), (0, 10**9, 0), (100, 10**9, 10)],
)
def test_kept_results_are_bounded_in_number_and_bytes(entries: int, limit: int, kept: int) -> None:
    """The last used stay; a long query counts as a long text does."""
    engine = Watched()
    config = ServiceConfig(batch_wait_ms=0, cache_entries=entries, cache_bytes=limit)

    async def main() -> None:
        async with client(create_app(engine, config)) as http:
            for query in "abcdefghij":
                await ask(http, query, topk=2)
            del engine.calls[:]
            for query in "jihgfedcba"[:kept]:
                await ask(http, query, topk=2)
            assert engine.calls == []
            await ask(http, "x" * 9000, topk=1)
            await ask(http, "x" * 9000, topk=1)
            assert len(engine.calls) == (2 if limit < 9000 or not entries else 1)

    asyncio.run(main())


def test_kept_results_are_nothing_to_the_garbage_collector() -> None:
    """Hits as objects took a full collection a second, in which the server answered nobody."""
    app = create_app(Watched(), ServiceConfig(batch_wait_ms=0))

    async def main() -> None:
        async with client(app) as http:
            await ask(http, "a")
            before = tracked()
            await ask(http, *map(str, range(300)), topk=100)
            assert len(app.state.service.batcher._cache) == 301
            assert tracked() - before < 300

    asyncio.run(main())


def tracked() -> int:
    """Objects that a full collection goes through."""
    for _ in range(3):  # a tuple is let go one collection after what is in it
        gc.collect()
    return len(gc.get_objects())
