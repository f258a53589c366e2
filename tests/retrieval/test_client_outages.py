"""Real server processes that are killed while searches are in progress."""

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.local_server import LocalServer
from search_r1.retrieval.schema import Document
from search_r1.retrieval.server import bind

NUM_SEARCHES = 300
NUM_CLIENTS = 16


@pytest.fixture
def args(corpus_path: Path, open_engine: Callable[[str], Retriever]) -> list[str]:
    """The flags of a bm25 server over the small corpus."""
    open_engine("bm25")
    folder = corpus_path.parent / "built"
    return ["--corpus_path", str(corpus_path), "--index_path", str(folder)]


@pytest.fixture
def expected(open_engine: Callable[[str], Retriever], queries: list[str]) -> list[list[Document]]:
    """The documents of the searches below, from the engine itself, one query at a time."""
    engine = open_engine("bm25")
    answers = {q: [hit.document for hit in engine.search([q], 3)[0]] for q in wordings(queries)}
    return [answers[query] for query in searches(queries)]


def wordings(queries: list[str]) -> list[str]:
    """Return many different queries with known answers."""
    return [f"{first} {second}" for first in queries for second in queries]


def searches(queries: list[str]) -> list[str]:
    different = wordings(queries)
    return [different[i % len(different)] for i in range(NUM_SEARCHES)]


async def search_all(
    client: RetrievalClient, queries: list[str], interrupt: Callable[[], None]
) -> list[list[Document]]:
    """Search for all queries in a few concurrent loops; call `interrupt` halfway."""
    results: dict[int, list[Document]] = {}
    half = asyncio.Event()

    async def search_every(first: int) -> None:
        for i in range(first, len(queries), NUM_CLIENTS):
            results[i] = await client.search(queries[i])
            if len(results) >= len(queries) // 2:
                half.set()

    async def cut() -> None:
        await half.wait()
        interrupt()

    async with client:
        await asyncio.gather(cut(), *map(search_every, range(NUM_CLIENTS)))
    return [results[i] for i in range(len(queries))]


def test_line_19_a_killed_server_that_returns_is_waited_for(
    args: list[str], queries: list[str], expected: list[list[Document]]
) -> None:
    """SIGKILL amid 300 searches and a restart on the same port: all get correct results."""
    with ThreadPoolExecutor(1) as pool, LocalServer(args) as server:
        first, again = server.pid, []

        def kill_and_start_again() -> None:
            server.kill()
            again.append(pool.submit(server.start))

        client = RetrievalClient(server.url, 3, max_retries=100, max_backoff=0.5)
        results = asyncio.run(search_all(client, searches(queries), kill_and_start_again))
        again[0].result()
        assert server.status is None and server.pid != first
    assert results == expected


def test_line_19_another_server_stands_in_for_a_killed_one(
    args: list[str], queries: list[str], expected: list[list[Document]]
) -> None:
    """The server in use is killed: the other one takes over without any delay."""
    with LocalServer(args) as one, LocalServer(args) as other:
        pids = {one.url: one.pid, other.url: other.pid}
        client = RetrievalClient(
            f"{one.url},{other.url}", 3, max_retries=1, backoff=600, max_backoff=600, deadline=60
        )
        in_use = client.urls[0]
        results = asyncio.run(
            search_all(client, searches(queries), lambda: os.kill(pids[in_use], signal.SIGKILL))
        )
        assert [one.status, other.status].count(None) == 1
    assert results == expected


def test_line_19_an_outage_of_all_names_every_server() -> None:
    """The error gives the reason for each url; the retry limit holds for all servers together."""
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", 0) as second:
        urls = [f"http://127.0.0.1:{closed.getsockname()[1]}" for closed in (first, second)]
        client = RetrievalClient(urls, max_retries=4, backoff=0.001, max_backoff=0.002)

        async def search() -> BaseException:
            async with client:
                [error] = await asyncio.gather(client.search("q"), return_exceptions=True)
            assert isinstance(error, BaseException)
            return error

        error = asyncio.run(search())
    assert all(url in str(error) for url in urls)
    assert str(error).count("ConnectError") == 2 and "gave up after 5 attempts" in str(error)
