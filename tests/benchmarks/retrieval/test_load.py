"""The load generator, with a small real server that counts queries."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from benchmarks.retrieval.load import (
    complete_result,
    read_response,
    run_client,
    run_load,
    run_raw,
)
from tests.apps import running

QUERIES = [f"question {i} 湖" for i in range(50)]


@contextmanager
def counting_server(topk: int = 3, fail_every: int = 0) -> Iterator[tuple[str, Counter[str]]]:
    """Serve `topk` documents per query; yields the URL and the counts of received queries."""
    app, received = FastAPI(), Counter[str]()

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Any:
        queries = (await request.json())["queries"]
        received.update(queries)
        if fail_every and received.total() % fail_every == 0:
            return Response("full", 503)
        documents = [{"id": "1", "contents": '"T"\nx'} for _ in range(topk)]
        return {"result": [[{"document": d, "score": 1.0} for d in documents] for _ in queries]}

    with running(app) as url:
        yield url, received


def test_every_query_is_sent_once() -> None:
    """Connections share the queries; none is lost or sent twice."""
    with counting_server() as (url, received):
        report = run_raw(url, [[query] for query in QUERIES], 8, 3)
    assert received == Counter(QUERIES)
    assert (report.num_queries, report.num_errors) == (50, 0)
    assert len(report.latencies) == len(report.answers) == 50
    assert 0 < report.latency(50) <= report.latency(99) <= report.seconds


def test_more_clients_than_queries() -> None:
    """Clients without a query do not hang."""
    with counting_server() as (url, received):
        assert run_raw(url, [["a"], ["b"]], 64, 3).num_queries == 2
    assert received == Counter(["a", "b"])


def test_batches_count_their_queries() -> None:
    """All queries of a request are counted; the request has one latency."""
    with counting_server() as (url, received):
        report = run_raw(url, [QUERIES[:30], QUERIES[30:]], 1, 3)
    assert (report.num_queries, len(report.latencies)) == (50, 2)
    assert received == Counter(QUERIES)


def test_refusals_are_errors() -> None:
    """A 503 counts as an error without a latency."""
    with counting_server(fail_every=10) as (url, _):
        report = run_raw(url, [[query] for query in QUERIES], 1, 3)
    assert (report.num_queries, report.num_errors, len(report.latencies)) == (45, 5, 45)
    assert report.first_error.startswith("503")


def test_missing_documents_are_errors() -> None:
    """An answer with too few documents is an error in both modes."""
    with counting_server(topk=2) as (url, _):
        assert run_raw(url, [["a"]], 1, 3).num_errors == 1
        assert run_client(url, ["a"], 1, 3).num_errors == 1


def test_client_mode_sends_every_query_once() -> None:
    """With RetrievalClient, which merges requests, every query is answered once."""
    with counting_server() as (url, received):
        report = run_client(url, QUERIES, 16, 3)
    assert received == Counter(QUERIES)
    assert (report.num_queries, report.num_errors) == (50, 0)


def test_a_lost_connection_is_an_error() -> None:
    """If the server closes the connection without a response, the run ends with an error."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async def run() -> int:
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            report = await asyncio.to_thread(
                run_raw, f"http://127.0.0.1:{port}", [["a"], ["b"]], 2, 3
            )
        return report.num_errors

    assert asyncio.run(run()) == 2


def test_the_report_comes_back_from_a_separate_process(tmp_path: Path) -> None:
    """The generator's process returns counts and answers."""
    with counting_server() as (url, received):
        report = run_load(url, QUERIES, clients=4)
    assert (report.num_queries, report.num_errors) == (50, 0)
    assert received == Counter(QUERIES)
    assert report.answers[0] is not None
    assert report.answers[0][0][0]["document"]["contents"] == '"T"\nx'


def test_a_response_is_complete_with_its_last_byte() -> None:
    """Every shorter prefix of the bytes is incomplete."""
    raw = b"HTTP/1.1 200 OK\r\nContent-Type: x\r\nContent-Length: 5\r\n\r\nhello"
    assert all(read_response(bytearray(raw[:cut])) is None for cut in range(len(raw)))
    assert read_response(bytearray(raw)) == (200, b"hello")


def test_responses_without_length_are_refused() -> None:
    """The end of a chunked response would never be detected."""
    with pytest.raises(ValueError, match="Content-Length"):
        read_response(bytearray(b"HTTP/1.1 200 OK\r\n\r\n"))


@pytest.mark.parametrize("body", [b"", b"{}", b'{"result": [[]]}', b'{"result": 3}', b"[1]"])
def test_incomplete_results(body: bytes) -> None:
    """A body without one full list of documents is not a complete result."""
    assert complete_result(body, 1, 3) is None
