"""The load generator, with a small real server that counts queries."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request

from benchmarks.retrieval.load import (
    read_response,
    run_client,
    run_load,
    run_raw,
)
from tests.apps import running

QUERIES = [f"question {i} 湖" for i in range(50)]


@contextmanager
def counting_server(topk: int = 3) -> Iterator[tuple[str, Counter[str]]]:
    """Serve `topk` documents per query; yields the URL and the counts of received queries."""
    app, received = FastAPI(), Counter[str]()

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Any:
        queries = (await request.json())["queries"]
        received.update(queries)
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
