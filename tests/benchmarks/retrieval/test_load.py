"""The load generator against a tiny real server that counts."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from benchmarks.retrieval.load import complete, read_answer, run_client, run_load, run_raw
from tests.apps import running

QUERIES = [f"question {i} 湖" for i in range(50)]


@contextmanager
def counting(topk: int = 3, fail_every: int = 0) -> Iterator[tuple[str, Counter[str]]]:
    """A server that answers every query with its own text, and what it was asked."""
    app, asked = FastAPI(), Counter[str]()

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Any:
        queries = (await request.json())["queries"]
        asked.update(queries)
        if fail_every and asked.total() % fail_every == 0:
            return Response("full", 503)
        documents = [{"id": "1", "contents": '"T"\nx'} for _ in range(topk)]
        return {"result": [[{"document": d, "score": 1.0} for d in documents] for _ in queries]}

    with running(app) as url:
        yield url, asked


def test_every_query_is_asked_once() -> None:
    """Many connections share the queries: none is lost, none is asked twice."""
    with counting() as (url, asked):
        report = run_raw(url, [[query] for query in QUERIES], 8, 3)
    assert asked == Counter(QUERIES)
    assert (report.num_queries, report.num_errors) == (50, 0)
    assert len(report.latencies) == len(report.answers) == 50
    assert 0 < report.latency(50) <= report.latency(99) <= report.seconds


def test_more_clients_than_queries() -> None:
    """Clients without work do not hang."""
    with counting() as (url, asked):
        assert run_raw(url, [["a"], ["b"]], 64, 3).num_queries == 2
    assert asked == Counter(["a", "b"])


def test_batches_count_their_queries() -> None:
    """A request of many queries counts as many."""
    with counting() as (url, asked):
        report = run_raw(url, [QUERIES[:30], QUERIES[30:]], 1, 3)
    assert (report.num_queries, len(report.latencies)) == (50, 2)
    assert asked == Counter(QUERIES)


def test_refusals_are_errors() -> None:
    """A 503 is counted and its latency is not."""
    with counting(fail_every=10) as (url, _):
        report = run_raw(url, [[query] for query in QUERIES], 1, 3)
    assert (report.num_queries, report.num_errors, len(report.latencies)) == (45, 5, 45)
    assert report.first_error.startswith("503")


def test_missing_documents_are_errors() -> None:
    """An answer with too few documents is not complete, in both modes."""
    with counting(topk=2) as (url, _):
        assert run_raw(url, [["a"]], 1, 3).num_errors == 1
        assert run_client(url, ["a"], 1, 3).num_errors == 1


def test_client_mode_asks_everything() -> None:
    """Through the merging client every query is answered once."""
    with counting() as (url, asked):
        report = run_client(url, QUERIES, 16, 3)
    assert asked == Counter(QUERIES)
    assert (report.num_queries, report.num_errors) == (50, 0)


def test_a_lost_connection_is_an_error() -> None:
    """A server that hangs up without an answer ends the run, and is counted."""

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


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The report comes back from the child process unchanged."""
    with counting() as (url, asked):
        report = run_load(url, QUERIES, clients=4)
    assert (report.num_queries, report.num_errors) == (50, 0)
    assert asked == Counter(QUERIES)
    assert report.answers[0] is not None
    assert report.answers[0][0][0]["document"]["contents"] == '"T"\nx'


def test_answers_are_read_in_any_pieces() -> None:
    """However the bytes are cut, the answer is complete with its last byte and not before."""
    raw = b"HTTP/1.1 200 OK\r\nContent-Type: x\r\nContent-Length: 5\r\n\r\nhello"
    assert all(read_answer(bytearray(raw[:cut])) is None for cut in range(len(raw)))
    assert read_answer(bytearray(raw)) == (200, b"hello")


def test_answers_without_length_are_refused() -> None:
    """A chunked answer would otherwise never end."""
    with pytest.raises(ValueError, match="Content-Length"):
        read_answer(bytearray(b"HTTP/1.1 200 OK\r\n\r\n"))


@pytest.mark.parametrize("body", [b"", b"{}", b'{"result": [[]]}', b'{"result": 3}', b"[1]"])
def test_incomplete_answers(body: bytes) -> None:
    """Whatever is not one full list of documents is not complete."""
    assert complete(body, 1, 3) is None
