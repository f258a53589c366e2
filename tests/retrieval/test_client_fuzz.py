"""The client against a scripted server of raw bytes: random statuses, bodies, cuts and delays."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from hypothesis import event, example, given
from hypothesis import strategies as st

from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.errors import SearchError
from search_r1.retrieval.schema import Document, from_wire

SLOW_S = 0.4
TIMEOUT_S = 0.15
MAX_RETRIES = 2
SLACK_S = 5.0
"""Allowance for a busy machine; a client that hangs exceeds it."""


@dataclass(frozen=True)
class ScriptedResponse:
    """The response to one request."""

    status: int = 200
    body: bytes | None = None
    """None: an echo of the queries."""
    headers: tuple[tuple[str, str], ...] = ()
    length_error: int = 0
    """Added to Content-Length."""
    kept: float = 1.0
    """Fraction of the bytes that is sent before the connection closes."""
    delay: float = 0.0
    is_trickled: bool = False
    """Sent byte by byte, for longer than the client waits."""
    reset: bool = False
    """Whether the connection is closed at once."""


def echo(queries: list[str]) -> bytes:
    """Return a response body with one document for each query, with the query as its id."""
    hits = [[{"document": {"id": q, "contents": f'"T"\n{q}'}, "score": 1.0}] for q in queries]
    return json.dumps({"result": hits}).encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
BODIES = st.one_of(
    st.none(),
    st.none(),
    st.binary(max_size=40),
    JSON.map(lambda value: json.dumps(value).encode()),
    JSON.map(lambda value: json.dumps({"result": value}).encode()),
    JSON.map(lambda value: json.dumps({"result": [[value]]}).encode()),
    st.just(echo(["of another request"]) + b"}"),
)
HEADERS = st.sampled_from(
    [
        ("Retry-After", "0"),
        ("Retry-After", "Sun, 99 Foo"),
        ("Content-Encoding", "gzip"),
        ("Content-Type", "application/json; charset=hex"),
        ("Location", "http://["),
        ("Transfer-Encoding", "chunked"),
        ("Connection", "close"),
    ]
)
RESPONSES = st.builds(
    ScriptedResponse,
    status=st.sampled_from([200, 200, 200, 204, 301, 400, 401, 422, 424, 429, 500, 503, 504, 999]),
    body=BODIES,
    headers=st.lists(HEADERS, max_size=2).map(tuple),
    length_error=st.sampled_from([0, 0, 0, 1, -1, 1000]),
    kept=st.sampled_from([1.0, 1.0, 1.0, 0.0, 0.5, 0.99]),
    delay=st.sampled_from([0.0, 0.0, 0.0, 0.02, SLOW_S]),
    is_trickled=st.sampled_from([False] * 9 + [True]),
    reset=st.sampled_from([False] * 5 + [True]),
)
QUERIES = st.lists(st.text(max_size=8), min_size=1, max_size=6)


async def read_queries(reader: asyncio.StreamReader) -> list[str]:
    """Return the queries of the next request; raises IncompleteReadError if there is none."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    return [str(query) for query in json.loads(await reader.readexactly(length))["queries"]]


async def write(
    response: ScriptedResponse, queries: list[str], writer: asyncio.StreamWriter
) -> bool:
    """Send the response; return whether the connection may be used again."""
    await asyncio.sleep(response.delay)
    body = echo(queries) if response.body is None else response.body
    length = max(0, len(body) + response.length_error)
    lines = [f"HTTP/1.1 {response.status} Scripted", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in response.headers]
    sent = ("\r\n".join(lines) + "\r\n\r\n").encode() + body
    sent = sent[: int(len(sent) * response.kept)]
    for i in range(0, len(sent), 1 if response.is_trickled else max(1, len(sent))):
        writer.write(sent[i : i + (1 if response.is_trickled else len(sent))])
        await writer.drain()
        if response.is_trickled:
            await asyncio.sleep(0.05)
    return response.kept == 1 and not response.length_error


@asynccontextmanager
async def scripted(responses: list[ScriptedResponse]) -> AsyncIterator[str]:
    """Start a server on a free port that sends the responses in turn, then echoes."""
    script = iter(responses)
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            is_open = True
            while is_open:
                queries = await read_queries(reader)
                response = next(script, ScriptedResponse())
                is_open = not response.reset and await write(response, queries, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client left, or the test is over
        finally:
            writer.close()
            connections.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in set(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


def is_echo(documents: list[Document], query: str) -> bool:
    return [document.id for document in documents] == [query]


def scripted_documents(responses: list[ScriptedResponse]) -> list[list[str]]:
    """Return the ids in valid scripted bodies, which a search may correctly return."""
    results = []
    for response in responses:
        body = response.body or b""
        try:
            # Every client cuts it at its Content-Length; a plain text is a document, too.
            read = from_wire(json.loads(body[: max(0, len(body) + response.length_error)]))
            results += [[document.id for document in documents] for documents in read]
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return results


CUT_TO_JSON = ScriptedResponse(body=echo(["of another request"]) + b"}", length_error=-1)


@example([CUT_TO_JSON], [""], None)
@given(st.lists(RESPONSES, max_size=8), QUERIES, st.sampled_from([None, 0.1, 0.3]))
def test_line_19_every_search_ends_with_documents_or_a_typed_error(
    responses: list[ScriptedResponse], queries: list[str], deadline: float | None
) -> None:
    """Whatever a server sends: no hang, no untyped exception, no results of other queries."""
    attempts_s = (MAX_RETRIES + 1) * (TIMEOUT_S + 0.02)
    bound = (
        2 * attempts_s if deadline is None else deadline
    )  # a refused batch is sent query by query

    async def search_all() -> list[list[Document] | BaseException]:
        async with scripted(responses) as url:
            client = RetrievalClient(
                url,
                timeout=TIMEOUT_S,
                max_retries=MAX_RETRIES,
                backoff=0.001,
                max_retry_after=0.01,
                max_batch=4,
                deadline=deadline,
            )
            async with asyncio.timeout(bound + SLACK_S):
                results = await asyncio.gather(*map(client.search, queries), return_exceptions=True)
            await client.aclose()  # not after a timeout: it would wait for the same requests
            return results

    scripted_ids = scripted_documents(responses)
    for query, result in zip(queries, asyncio.run(search_all()), strict=True):
        event(type(result).__name__)
        if isinstance(result, BaseException):
            assert isinstance(result, SearchError), repr(result)
        else:
            ids = [document.id for document in result]
            assert is_echo(result, query) or ids in scripted_ids, (query, ids)


def test_the_oracle_distinguishes_documents() -> None:
    """The oracle above is not vacuous: it distinguishes echoes from documents of other queries."""
    assert is_echo([Document.from_contents("a", "x")], "a")
    assert not is_echo([Document.from_contents("b", "x")], "a")
    assert scripted_documents([ScriptedResponse(body=echo(["z"]))]) == [["z"]]
