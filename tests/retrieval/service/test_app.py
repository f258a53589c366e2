"""Limits, statuses, token, draining, facts and page of the app."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from search_r1.retrieval.errors import (
    CorpusError,
    Overloaded,
    SetupError,
    UpstreamInvalid,
    UpstreamRefused,
    UpstreamUnavailable,
)
from search_r1.retrieval.service.app import create_app
from search_r1.retrieval.service.batching import BatchResult
from search_r1.retrieval.service.requests import STATUSES
from search_r1.retrieval.settings import ServiceConfig
from tests.retrieval.service.fake_backends import FakeBackend, ask, client, metric, until

SMALL = ServiceConfig(
    topk=2, max_topk=4, max_queries=3, max_query_chars=10, max_body_bytes=200, max_pending=3,
    batch_wait_ms=0, deadline=20.0, cache_entries=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("body", "location", "allowed"),
    [
        ({"queries": ["a"] * 4}, ["body", "queries"], "at most 3"),
        ({"queries": ["a", "b" * 11]}, ["body", "queries", 1], "at most 10"),
        ({"queries": ["a"], "topk": 5}, ["body", "topk"], "less than or equal to 4"),
        ({"queries": ["a"], "topk": 10**30}, ["body", "topk"], "less than or equal to 4"),
        ({"queries": ["a"], "deadline_s": 0}, ["body", "deadline_s"], "greater than 0"),
        ({"queries": ["a"], "deadline_s": float("inf")}, ["body", "deadline_s"], "finite"),
        ({"queries": ["a"], "top_k": 1}, ["body", "top_k"], "did you mean topk?"),
        ({"queries": ["a"], "filter": {"year": 1990}}, ["body", "filter", "year"], "no filter"),
        ({"queries": ["a"], "filters": 1}, ["body", "filters"], "mean filter?"),
        ({"queries": ["a"], "Topk": 1}, ["body", "Topk"], "did you mean topk?"),
        ({"queries": ["a"], "return_score": 1}, ["body", "return_score"], "return_scores"),
        ({"queries": ["a"], "deadline": 1}, ["body", "deadline"], "deadline_s"),
    ],
)
def test_beyond_a_limit(body: Any, location: list[Any], allowed: str) -> None:
    """Beyond a limit, 422 names the location and the limit, and nothing is searched."""
    backend = FakeBackend()

    async def main() -> None:
        async with client(create_app(backend, SMALL)) as http:
            answer = await http.post("/retrieve", content=json.dumps(body))
            assert answer.status_code == 422
            (detail,) = answer.json()["detail"]
            assert detail["loc"] == location and allowed in detail["msg"]
            assert backend.calls == []
            assert (await ask(http, "a", "b", "c" * 10, topk=4)).status_code == 200
            # Fields of other servers, which are nothing of ours, are ignored.
            assert (await ask(http, "a", method="e5", filters=[])).status_code == 200

    asyncio.run(main())


def test_unknown_fields_of_a_large_body_are_not_read() -> None:
    """Millions of nested lists in one would make all requests wait for seconds."""
    body = b'{"queries": ["a"], "top_k": [%b1]}' % (b"[]," * 400_000)

    async def main() -> None:
        async with client(create_app(FakeBackend())) as http:
            assert (await http.post("/retrieve", content=body)).status_code == 200
            assert (await http.post("/retrieve", content=body[:-1])).status_code == 422

    asyncio.run(main())


@pytest.mark.parametrize("size", [200, 201, 700, 5000])
@pytest.mark.parametrize("has_length", [True, False])
def test_body_size(size: int, has_length: bool) -> None:
    """A body over the limit gets 413 with the limit, with and without Content-Length."""
    content = json.dumps({"queries": ["a"]}).ljust(size).encode()

    async def chunks() -> Any:
        for start in range(0, size, 50):
            yield content[start : start + 50]

    async def main() -> None:
        async with client(create_app(FakeBackend(), SMALL)) as http:
            answer = await http.post("/retrieve", content=content if has_length else chunks())
        assert answer.status_code == (200 if size <= 200 else 413)
        if size > 200:
            assert "at most 200 bytes" in answer.json()["detail"]

    asyncio.run(main())


def test_a_full_queue_is_503_with_retry_after() -> None:
    """Beyond max_pending, requests are refused until there are free slots; joined ones are not."""
    backend = FakeBackend()
    app = create_app(backend, SMALL)

    async def main() -> None:
        async with client(app) as http:
            backend.gate.clear()
            waiting = [asyncio.ensure_future(ask(http, f"q{i}")) for i in range(3)]
            await until(lambda: app.state.service.batcher.num_pending == 3)
            answer = await ask(http, "one more")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "3 may wait" in answer.json()["detail"]
            joined = asyncio.ensure_future(ask(http, "q0", "q1"))
            backend.gate.set()
            answers = await asyncio.gather(*waiting, joined)
            assert {a.status_code for a in answers} == {200}
            assert (await ask(http, "one more")).status_code == 200

    asyncio.run(main())
    assert metric(app, 'retriever_requests_total{status="503"}') == 1
    assert metric(app, 'retriever_requests_total{status="200"}') == 5
    assert metric(app, "retriever_request_seconds_count") == 5
    assert metric(app, "retriever_pending") == metric(app, "retriever_queue_length") == 0


@pytest.mark.parametrize(
    ("num_queries", "seconds", "excess", "expected"),
    [(10, 1.0, 50, 5.0), (10, 1.0, 5, 1.0), (1, 10.0, 50, 60.0)],
)
def test_retry_after_is_the_excess_over_the_measured_rate(
    num_queries: int, seconds: float, excess: int, expected: float
) -> None:
    """Retry-After is the time to answer the excess queries, between 1 and 60 s."""
    config = ServiceConfig(max_pending=100, max_queries=100)
    batcher = create_app(FakeBackend(), config).state.service.batcher
    batcher._update_estimates(num_queries, BatchResult([[]] * num_queries, elapsed=seconds))
    batcher._check_capacity(100)
    with pytest.raises(Overloaded) as caught:
        batcher._check_capacity(100 + excess)
    assert caught.value.retry_after == pytest.approx(expected)


def test_deadlines_are_504() -> None:
    """Both the request's deadline and the server's end the wait."""
    backend = FakeBackend()

    async def main() -> None:
        config = ServiceConfig(deadline=0.02, batch_wait_ms=0)
        async with client(create_app(backend, config)) as http:
            backend.gate.clear()
            own = await ask(http, "a", deadline_s=0.01)
            capped = await ask(http, "a", deadline_s=1000.0)
            assert (own.status_code, capped.status_code) == (504, 504)
            assert "0.01 s" in own.json()["detail"] and "0.02 s" in capped.json()["detail"]
            backend.gate.set()

    asyncio.run(main())


@pytest.mark.parametrize("parts", [[], [b"{"]])
def test_a_body_that_never_ends_is_504(parts: list[bytes]) -> None:
    """A client that stops before or within its body does not keep a request open forever."""
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    app = create_app(FakeBackend(), ServiceConfig(deadline=0.02))
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/retrieve",
        "headers": [],
        "query_string": b"",
    }
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 10))
    assert sent[0]["status"] == 504


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (UpstreamUnavailable("away"), 503, "5"),
        (UpstreamInvalid("a list"), 502, None),
        (UpstreamRefused("wrong key"), 424, None),
    ],
)
def test_an_online_service_that_fails(
    error: Exception, status: int, retry_after: str | None
) -> None:
    """A 503 or 502 is sent only if a retry can help."""

    async def main() -> None:
        backend = FakeBackend(num_threads=4, failures={"q": error})
        async with client(create_app(backend)) as http:
            answer = await ask(http, "q")
            assert (answer.status_code, answer.headers.get("retry-after")) == (status, retry_after)
            assert answer.json() == {"detail": str(error)}

    asyncio.run(main())


def test_a_malformed_document_is_reported() -> None:
    """`GET /document` of a malformed row is a 500 that names the row, as for a search."""

    def find(id: str) -> None:
        raise CorpusError(f"row of {id} is malformed")

    async def main() -> None:
        async with client(create_app(FakeBackend(), find=find)) as http:
            answer = await http.get("/document?id=7")
            assert answer.status_code == 500
            assert answer.json() == {"detail": "row of 7 is malformed"}

    asyncio.run(main())


def test_the_deadline_counts_from_the_first_byte() -> None:
    """The time that a slow body takes is subtracted from the time for its search."""
    backend = FakeBackend()
    backend.gate.clear()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"queries": '
        await asyncio.sleep(1.8)
        yield b'["a"]}'

    async def main() -> None:
        async with client(create_app(backend, ServiceConfig(deadline=2.0))) as http:
            start = time.monotonic()
            try:
                assert (await http.post("/retrieve", content=body())).status_code == 504
                assert time.monotonic() - start < 3.5
            finally:
                backend.gate.set()

    asyncio.run(main())


def test_draining() -> None:
    """Accepted requests are finished; new requests and /health get 503 with Retry-After."""
    backend = FakeBackend()
    app = create_app(backend, ServiceConfig(batch_wait_ms=0))

    async def main() -> None:
        async with client(app) as http:
            assert (await http.get("/health")).json()["status"] == "ok"
            backend.gate.clear()
            accepted = asyncio.ensure_future(ask(http, "a"))
            await asyncio.to_thread(backend.entered.acquire)
            app.state.service.drain()
            for answer in (await ask(http, "b"), await http.get("/health")):
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            backend.gate.set()
            assert (await accepted).status_code == 200

    asyncio.run(main())
    assert app.state.service.close()


def test_draining_ends_in_time() -> None:
    """The request of a search that does not end gets 503 after the drain time."""
    backend = FakeBackend()
    app = create_app(backend, ServiceConfig(batch_wait_ms=0, drain=0.01))

    async def main() -> None:
        async with client(app) as http:
            backend.gate.clear()
            accepted = asyncio.ensure_future(ask(http, "a"))
            await asyncio.to_thread(backend.entered.acquire)
            app.state.service.drain()
            assert (await accepted).status_code == 503
            assert not app.state.service.close()
            backend.gate.set()

    asyncio.run(main())


NUMBERS = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0.0", b"9" * 400, b"9" * 5000]


@pytest.mark.parametrize("query", [b"a", b"\\ud800"], ids=["text", "half a character"])
def test_numbers_that_json_has_not_are_refused(query: bytes) -> None:
    """In every field, by either of the two parsers: a 422 in JSON, and no 500."""

    async def main() -> None:
        async with client(create_app(FakeBackend())) as http:
            for number, name in itertools.product(NUMBERS, (b"topk", b"deadline_s", b"queries")):
                queries = b"" if name == b"queries" else b'"queries":["%s"],' % query
                body = b'{%s"%s":%s}' % (queries, name, number)
                answer = await http.post("/retrieve", content=body)
                assert answer.status_code == 422, body[:60]
                assert answer.json()["detail"][0]["loc"][0] == "body"

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/retrieve", "/info", "/metrics"])
@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic secret", "secret"])
def test_the_token_is_required(path: str, header: str | None) -> None:
    """Without the token: 401 before any search. The scheme may have any case."""
    backend = FakeBackend()

    async def main() -> None:
        async with client(create_app(backend, token="secret")) as http:
            method = "POST" if path == "/retrieve" else "GET"
            body = b'{"queries": ["a"]}'
            headers = {} if header is None else {"Authorization": header}
            answer = await http.request(method, path, content=body, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert "secret" not in answer.text and backend.calls == []
            for scheme in ("Bearer", "bearer"):
                headers = {"Authorization": f"{scheme} secret"}
                answer = await http.request(method, path, content=body, headers=headers)
                assert answer.status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/health", "/", "/page.js", "/page.css", "/openapi.json"])
def test_routes_without_a_token(path: str) -> None:
    """The page, the OpenAPI contract and the health check need no token."""

    async def main() -> None:
        async with client(create_app(FakeBackend(), token="secret")) as http:
            assert (await http.get(path)).status_code == 200

    asyncio.run(main())


def test_the_page_is_isolated(tmp_path: Any) -> None:
    """The page loads nothing from other hosts, and no request path opens a file."""

    async def main() -> None:
        async with client(create_app(FakeBackend())) as http:
            page = await http.get("/")
            assert page.headers["content-type"].startswith("text/html")
            assert page.headers["content-security-policy"].startswith("default-src 'self';")
            for path in ("/app.py", "/page.py", "/..%2fapp.py", "/%2e%2e/app.py", "//etc/passwd"):
                assert (await http.get(path)).status_code == 404

    asyncio.run(main())


def test_info_and_metrics() -> None:
    """/info has facts, limits and a fingerprint of the facts; /metrics has stages by name."""
    backend = FakeBackend()

    async def main() -> Iterator[str]:
        async with client(create_app(backend, SMALL)) as http:
            info = (await http.get("/info")).json()
            assert info["engine"] == info["retriever"] == "fake"
            assert info["default_topk"] == 2
            assert info["limits"]["max_queries"] == 3
            assert info["memory"]["own"] > 1 << 20 and info["memory"]["mapped"] > 0
            await ask(http, "a")
            text = (await http.get("/metrics")).text
            assert 'retriever_stage_seconds_count{stage="queue"} 1.0' in text
            return info["fingerprint"]

    first = asyncio.run(main())
    assert asyncio.run(main()) == first
    backend.facts = {"engine": "fake", "nprobe": 1}
    assert asyncio.run(main()) != first


def test_openapi_describes_the_service() -> None:
    """OpenAPI has the request with this server's limits and every error status; only POST works."""

    async def main() -> None:
        async with client(create_app(FakeBackend(), SMALL)) as http:
            document = (await http.get("/openapi.json")).json()
            operation = document["paths"]["/retrieve"]["post"]
            assert set(operation["responses"]) == {"200", *map(str, STATUSES)}
            body = operation["requestBody"]["content"]["application/json"]["schema"]
            fields = body["properties"]
            assert fields["queries"]["maxItems"] == 3
            assert fields["queries"]["items"]["maxLength"] == 10
            assert (await http.get("/retrieve")).status_code == 405
            assert (await http.get("/docs")).status_code == 404  # it would load scripts

    asyncio.run(main())


def test_contradicting_limits() -> None:
    """Limits that would refuse every full request are refused when the app is created."""
    for config in (ServiceConfig(topk=9, max_topk=8), ServiceConfig(max_queries=9, max_pending=8)):
        with pytest.raises(SetupError, match="expected"):
            create_app(FakeBackend(), config)


def test_a_long_response_is_sent_in_chunks() -> None:
    """A response to the largest request has the same bytes, in small chunks."""
    backend = FakeBackend()
    app = create_app(backend, ServiceConfig(batch_wait_ms=0))

    async def main() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async with client(app) as http:
            one = (await ask(http, "a", topk=100)).content
        body = json.dumps({"queries": ["a"] * 4096, "topk": 100}).encode()
        messages = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        scope = {"type": "http", "method": "POST", "path": "/retrieve", "headers": []}
        await app({**scope, "query_string": b"", "asgi": {"spec_version": "2.3"}}, receive, send)
        parts = [message.get("body", b"") for message in sent[1:]]
        row = one.removeprefix(b'{"result":[').removesuffix(b"]}")
        assert b"".join(parts) == b'{"result":[' + b",".join([row] * 4096) + b"]}"
        assert max(map(len, parts)) < 25 * len(row)

    asyncio.run(main())
