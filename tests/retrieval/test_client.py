"""The client against a real server with scripted failures: merging, retries, errors, loops."""

import asyncio
import json
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.errors import RetrieverRefused, RetrieverUnavailable
from search_r1.retrieval.in_memory import InMemoryRetrieval
from search_r1.retrieval.protocol import EmptyRetrieval
from search_r1.retrieval.schema import Document
from search_r1.retrieval.server import bind, create_app

GOOD = 200
SLOW = 0
"""A scripted status that means: respond too late."""
SLOW_S = 1.0


@dataclass
class Script:
    """The statuses of the next responses (200 after the last), and the requests received."""

    statuses: list[int] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    poison: str = ""
    """A query for which the whole request is refused with 422."""
    body: bytes | None = None
    """Body of successful responses; None: an echo of the queries."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of scripted failures."""
    refuses: str = ""
    """A field of the request body that is refused by name."""
    tokens: list[str | None] = field(default_factory=list)
    """The Authorization headers of the requests."""


def scripted(script: Script) -> FastAPI:
    """Start a server that echoes each query as a document in the original server's format."""
    app = FastAPI()

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        body = await request.json()
        script.requests.append(body)
        script.tokens.append(request.headers.get("Authorization"))
        if script.refuses in body:
            return Response(f"extra field {script.refuses}", status_code=422)
        status = script.statuses.pop(0) if script.statuses else GOOD
        if status == SLOW:
            await asyncio.sleep(SLOW_S)
        if status not in (SLOW, GOOD):
            return Response("scripted", status_code=status, headers=script.headers)
        if script.poison and script.poison in body["queries"]:
            return Response("poisoned", status_code=422)
        if script.body is not None:
            return Response(script.body)
        document = {"id": 1, "contents": '"T"\n'}
        hits = [
            [{"document": {**document, "contents": f'"T"\n{q}'}, "score": 1.0}]
            for q in body["queries"]
        ]
        return Response(json.dumps({"result": hits}))

    return app


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script, serve: Callable[..., Any]) -> Iterator[str]:
    with serve(scripted(script)) as address:
        yield address


def ask(client: RetrievalClient, *queries: str) -> list[list[Document] | BaseException]:
    """Return the results of concurrent searches in a new event loop; exceptions are returned."""

    async def gather() -> list[list[Document] | BaseException]:
        try:
            return await asyncio.gather(*map(client.search, queries), return_exceptions=True)
        finally:
            await client.aclose()

    return asyncio.run(gather())


async def health(client: RetrievalClient) -> dict[str, Any]:
    async with client:
        return await client.health()


def texts(results: list[Any]) -> list[str]:
    return [documents[0].text for documents in results]


def test_concurrent_searches_share_requests(url: str, script: Script) -> None:
    """Concurrent searches share requests of at most max_batch queries; each gets its own result."""
    queries = [f"q{i}" for i in range(10)]
    results = ask(RetrievalClient(url, 4, max_batch=4), *queries)
    assert texts(results) == queries
    assert sorted(len(r["queries"]) for r in script.requests) == [2, 4, 4]
    assert {r["topk"] for r in script.requests} == {4}


@pytest.mark.parametrize("suffix", ["", "/", "/retrieve", "/retrieve/"])
def test_url_forms(url: str, suffix: str) -> None:
    """Base address and full address mean the same; title and text come from contents."""
    [[document]] = ask(RetrievalClient(url + suffix), "q")
    assert document == Document("1", "T", "q", '"T"\nq')


def test_url_without_scheme_is_refused() -> None:
    """A url without a scheme is refused at once, with an example."""
    with pytest.raises(ValueError, match="http://127"):
        RetrievalClient("127.0.0.1:8000")


def test_equal_searches_are_sent_once(url: str, script: Script) -> None:
    """Each of several equal searches gets the documents in a separate list."""
    results = ask(RetrievalClient(url), "a", "b", "a", "a\ud800", "a?")
    assert texts(results) == ["a", "b", "a", "a?", "a?"]
    assert [r["queries"] for r in script.requests] == [["a", "b", "a?"]]
    assert results[0] is not results[2]


@pytest.mark.parametrize("failures", [[500], [503, 502], [429], [429, 500, 504]])
def test_transient_failures_are_retried(url: str, script: Script, failures: list[int]) -> None:
    """429 and 5xx are retried with growing delays until a response succeeds."""
    script.statuses = list(failures)
    start = time.monotonic()
    assert texts(ask(RetrievalClient(url, backoff=0.05, max_retries=3), "q")) == ["q"]
    assert len(script.requests) == len(failures) + 1
    assert time.monotonic() - start >= sum(0.05 * 2**n / 2 for n in range(len(failures)))


def test_retries_are_bounded(url: str, script: Script) -> None:
    """A permanent failure is a RetrieverUnavailable that names the server, for every search."""
    script.statuses = [503] * 99
    results = ask(RetrievalClient(url, backoff=0.01, max_retries=2), "a", "b")
    assert [type(error) for error in results] == [RetrieverUnavailable] * 2
    assert url in str(results[0]) and "503" in str(results[0]) and "3 attempts" in str(results[0])
    assert len(script.requests) == 3


@pytest.mark.parametrize("status", [503, 429])
def test_line_19_a_server_that_asks_for_time_gets_it(url: str, script: Script, status: int) -> None:
    """`Retry-After` lengthens a delay, up to the limit."""
    script.statuses, script.headers = [status], {"Retry-After": "3600"}
    start = time.monotonic()
    client = RetrievalClient(url, backoff=0.001, max_retry_after=0.3)
    assert texts(ask(client, "q")) == ["q"]
    assert 0.3 <= time.monotonic() - start < 60
    assert len(script.requests) == 2


def test_line_19_a_deadline_ends_a_search(url: str, script: Script) -> None:
    """The deadline cuts attempts short, and no delay begins that would exceed it."""
    script.statuses = [SLOW] * 9
    start = time.monotonic()
    [error] = ask(RetrievalClient(url, deadline=0.2), "q")
    assert isinstance(error, RetrieverUnavailable) and "deadline" in str(error)
    assert time.monotonic() - start < SLOW_S
    script.statuses, script.headers = [503] * 9, {"Retry-After": "20"}
    start = time.monotonic()
    [error] = ask(RetrievalClient(url, deadline=10), "q")
    assert isinstance(error, RetrieverUnavailable) and "deadline" in str(error)
    assert time.monotonic() - start < 10
    with pytest.raises(ValueError, match="deadline 0"):
        RetrievalClient(url, deadline=0)


def test_servers_get_the_timeout_of_an_attempt(url: str, script: Script) -> None:
    """`deadline_s` is the attempt's time; a server that refuses the field never gets it again."""
    assert texts(ask(RetrievalClient(url, timeout=7), "q")) == ["q"]
    assert script.requests[-1]["deadline_s"] == pytest.approx(7, abs=0.5)
    ask(RetrievalClient(url, timeout=7, deadline=5), "q")
    assert 0 < script.requests[-1]["deadline_s"] <= 5
    script.refuses = "deadline_s"
    script.requests.clear()
    client = RetrievalClient(url, max_retries=0)  # since this is no failure of the server
    assert texts(ask(client, "a", "b")) == ["a", "b"]
    assert texts(ask(client, "c")) == ["c"]
    assert ["deadline_s" in request for request in script.requests] == [True, False, False]


def test_an_unexpected_error_is_raised_by_the_searches(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The searches are not cancelled, which would end their tasks without any message."""
    monkeypatch.setattr("search_r1.retrieval.client.parse_documents", lambda *_: 1 / 0)
    assert [type(error) for error in ask(RetrievalClient(url), "a", "b")] == [ZeroDivisionError] * 2


def test_concurrent_requests_may_all_have_a_refused_deadline(url: str, script: Script) -> None:
    """Each of several requests that a server refuses because of `deadline_s` is sent again."""
    script.refuses = "deadline_s"
    client = RetrievalClient(url, max_batch=1)
    assert texts(ask(client, *"abcd")) == [*"abcd"]
    assert len(script.requests) > len("abcd") + 1


def test_the_token_is_sent_and_never_shown(
    url: str, script: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes from environment or argument, also after pickling; never in repr, logs, errors."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("RETRIEVER_TOKEN", "from-env-5")
    client = pickle.loads(pickle.dumps(RetrievalClient(url, max_retries=1, backoff=0.01)))
    monkeypatch.setenv("RETRIEVER_TOKEN", "")
    script.statuses = [500, 500]
    [error] = ask(client, "q")
    ask(RetrievalClient(url, token="given-7"), "q")
    ask(RetrievalClient(url), "q")
    assert script.tokens == ["Bearer from-env-5"] * 2 + ["Bearer given-7", None]
    output = f"{client!r} {client.__getstate__()!r} {vars(client)} {error} {caplog.text}"
    assert caplog.text and "from-env-5" not in output and "given-7" not in output
    for wrong in ("two words", "line\nbreak", "ключ"):
        with pytest.raises(ValueError, match="RETRIEVER_TOKEN") as caught:
            RetrievalClient(url, token=wrong)
        assert wrong not in str(caught.value)


@pytest.mark.parametrize("status", [301, 401, 404, 413, 421, 422, 424])
def test_line_19_refusals_are_not_retried(url: str, script: Script, status: int) -> None:
    """A 3xx or 4xx fails at once; only what a query can have caused is asked one by one."""
    script.statuses = [status] * 9
    results = ask(RetrievalClient(url), "a", "b")
    assert [type(error) for error in results] == [RetrieverRefused] * 2
    assert [error.status for error in results if isinstance(error, RetrieverRefused)] == [
        status
    ] * 2
    assert len(script.requests) == (3 if status in (413, 422, 424) else 1)
    assert ("RETRIEVER_TOKEN" in str(results[0])) == (status == 401)


def test_timeouts_are_retried(url: str, script: Script) -> None:
    """A response that is too late counts as a failed attempt."""
    script.statuses = [SLOW]
    assert texts(ask(RetrievalClient(url, timeout=0.2, backoff=0.01), "q")) == ["q"]
    script.statuses = [SLOW, SLOW]
    start = time.monotonic()
    [error] = ask(RetrievalClient(url, timeout=0.2, backoff=0.01, max_retries=1), "q")
    assert isinstance(error, RetrieverUnavailable) and "Timeout" in str(error)
    assert time.monotonic() - start < SLOW_S


def test_refused_connections_are_unavailable() -> None:
    """A refused connection is a RetrieverUnavailable, for searches and for health."""
    with bind("127.0.0.1", 0) as closed:
        client = RetrievalClient(
            f"http://127.0.0.1:{closed.getsockname()[1]}", backoff=0.01, max_retries=1
        )
        [error] = ask(client, "q")
        assert isinstance(error, RetrieverUnavailable) and "retrieval_launch.sh" in str(error)
        with pytest.raises(RetrieverUnavailable):
            asyncio.run(health(client))


def test_the_server_may_come_later(script: Script, serve: Callable[..., Any]) -> None:
    """An outage shorter than the retries is survived."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    client = RetrievalClient(f"http://127.0.0.1:{port}", backoff=0.1, max_retries=6)

    async def search_then_start() -> list[Document]:
        search = asyncio.create_task(client.search("q"))
        await asyncio.sleep(0.15)
        with serve(scripted(script), port):
            results = await search
            await client.aclose()
            return results

    assert asyncio.run(search_then_start())[0].text == "q"


def test_a_refused_query_does_not_fail_others(url: str, script: Script) -> None:
    """A refused batch is sent query by query, so that only the invalid query fails."""
    script.poison = "bad"
    results = ask(RetrievalClient(url), "a", "bad", "b")
    assert texts([results[0], results[2]]) == ["a", "b"]
    assert isinstance(results[1], RetrieverRefused) and "422" in str(results[1])
    assert len(script.requests) == 4


def test_one_client_serves_many_event_loops(url: str) -> None:
    """A client may be pickled, and used in one event loop after another."""
    client = pickle.loads(pickle.dumps(RetrievalClient(url)))
    assert [texts(ask(client, "q")) for _ in range(3)] == [["q"]] * 3


def test_a_cancelled_search_leaves_the_others(url: str) -> None:
    """Cancelling one search of a batch neither breaks nor delays the rest."""

    async def cancel_first() -> list[Document]:
        client = RetrievalClient(url)
        first, second = (asyncio.create_task(client.search(q)) for q in "ab")
        await asyncio.sleep(0)
        first.cancel()
        try:
            return await second
        finally:
            await client.aclose()

    assert asyncio.run(cancel_first())[0].text == "b"


def test_ill_formed_documents_are_repaired(url: str, script: Script) -> None:
    """Lone surrogates in a response would break a tokenizer; whole pairs are kept."""
    script.body = b'{"result": [[{"id": "1", "contents": "\\"T\\"\\n\\ud83d\\ude00 \\uD800"}]]}'
    assert texts(ask(RetrievalClient(url), "q")) == ["\U0001f600 ?"]


@pytest.mark.parametrize("score", [b"NaN", b"Infinity", b"123456789012345678901234567890"])
def test_scores_that_only_some_json_readers_accept(url: str, script: Script, score: bytes) -> None:
    script.body = b'{"result": [[{"document": {"id": 1, "contents": "a"}, "score": %b}]]}' % score
    assert texts(ask(RetrievalClient(url), "q")) == ["a"]


@pytest.mark.parametrize("name", ["bm25", "hash", "empty"])
def test_line_18_merged_answers_are_serial_answers(
    name: str,
    open_engine: Callable[[str], Retriever],
    serve: Callable[..., Any],
    queries: list[str],
) -> None:
    """Through client and server, every engine gives each query the documents of a serial search."""
    engine = open_engine(name)
    asked = queries * 10
    with serve(create_app(engine)) as address:
        client = RetrievalClient(address, topk=2, max_batch=16)
        results = ask(client, *asked)
        assert asyncio.run(health(client))["retriever"] == name
    expected = [[hit.document for hit in engine.search([query], 2)[0]] for query in asked]
    assert results == expected


def test_in_memory_retrievals_need_no_server() -> None:
    """The in-memory retrievals search a mapping by query or a list by words, and record queries."""
    paris, lyon = (Document.from_title(c, c, f"{c} is a city") for c in ("Paris", "Lyon"))

    async def search_all() -> list[list[Document]]:
        listed, mapped = InMemoryRetrieval([paris, lyon], topk=1), InMemoryRetrieval({"q": [lyon]})
        results = [await listed.search("city Lyon"), await listed.search("zebra")]
        results += [await mapped.search("q"), await mapped.search("x")]
        assert (listed.queries, mapped.queries) == (["city Lyon", "zebra"], ["q", "x"])
        return [*results, await EmptyRetrieval().search("q")]

    assert asyncio.run(search_all()) == [[lyon], [], [lyon], [], []]


def test_a_cancelled_request_ends_its_searches(url: str, script: Script) -> None:
    """When the task of a batch is cancelled, its searches end instead of hanging."""
    script.statuses = [SLOW]

    async def interrupt() -> None:
        async with RetrievalClient(url) as client:
            search = asyncio.create_task(client.search("q"))
            while not script.requests:
                await asyncio.sleep(0.01)
            [request] = asyncio.all_tasks() - {search, asyncio.current_task()}
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(search, timeout=5)

    asyncio.run(interrupt())
