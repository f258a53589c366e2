"""Several worker processes behind one port: real processes, replaced, killed and ended."""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.errors import RetrieverUnavailable, SetupError
from search_r1.retrieval.local_server import LocalServer
from search_r1.retrieval.service import workers
from search_r1.retrieval.settings import FaultConfig, RetrieverConfig, ServerOptions

NUM_CLIENTS = 64
QUERY = {"queries": ["capital of France"], "topk": 3}


@pytest.fixture(scope="module")
def server(corpus_path: Path, open_engine: Callable[[str], Retriever]) -> Iterator[LocalServer]:
    open_engine("bm25")  # builds the index
    index = corpus_path.parent / "built"
    args = ["--corpus_path", str(corpus_path), "--index_path", str(index), "--workers", "2"]
    with LocalServer(args) as server:
        yield server


def workers_of(server: LocalServer) -> set[int]:
    """Processes that serve: not multiprocessing's resource tracker, nor any that has ended."""
    found = set()
    for child in psutil.Process(server.pid).children():
        with contextlib.suppress(psutil.Error):
            if "resource_tracker" not in "".join(child.cmdline()):
                found.add(child.pid)
    return found


def wait_until(is_true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.1)


async def ask_while(server: LocalServer, is_going_on: Callable[[], bool]) -> list[str]:
    """Answers of 64 clients, each with its own connection, which never retry."""

    async def client() -> list[str]:
        answers = []
        async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
            while is_going_on():
                answers.append((await http.post(f"{server.url}/retrieve", json=QUERY)).text)
                await asyncio.sleep(0.05)
        return answers

    return [text for texts in await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
            for text in texts]  # fmt: skip


def test_all_are_replaced_while_64_clients_search(server: LocalServer) -> None:
    """SIGHUP: other processes, no failed request, one answer; metrics count those of all."""
    before = workers_of(server)
    first = httpx.post(f"{server.url}/retrieve", json=QUERY).text
    os.kill(server.pid, signal.SIGHUP)
    texts = asyncio.run(ask_while(server, lambda: bool(before & workers_of(server))))
    assert {*texts} == {first}
    assert len(workers_of(server)) == 2
    metrics = httpx.get(f"{server.url}/metrics").text
    count = re.search(r'retriever_requests_total\{status="200"\} (\d+)', metrics)
    assert count and int(count[1]) == len(texts) + 1
    assert "retriever_pending 0" in metrics


def test_a_killed_worker_is_replaced(server: LocalServer) -> None:
    """The others serve, and soon there are as many as before; /info says how many."""
    before = workers_of(server)
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: killed not in workers_of(server) and len(workers_of(server)) == 2)
    limits = httpx.get(f"{server.url}/info", timeout=30).json()["limits"]
    assert limits["workers"] == 2
    assert limits["max_connections"] > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent(corpus_path: Path, number: int) -> None:
    """However the parent ends; after SIGTERM its status is 0."""
    server = LocalServer(["--corpus_path", str(corpus_path), "--workers", "2"]).start()
    processes = [psutil.Process(pid) for pid in workers_of(server)]
    os.kill(server.pid, number)
    _, alive = psutil.wait_procs(processes, 20)
    assert not alive
    wait_until(lambda: server.status is not None)
    assert server.status == (0 if number == signal.SIGTERM else -number)
    server.kill()


def test_what_workers_would_multiply_is_refused() -> None:
    """The rate of an online service, and faults that are drawn in turn."""
    online = ServerOptions(workers=2, retriever=RetrieverConfig("brave"))
    for options in (online, ServerOptions(workers=2, faults=FaultConfig(0.5))):
        with pytest.raises(SetupError, match="--workers"):
            workers.check(options)


def test_a_start_that_fails_is_told_once(tmp_path: Path) -> None:
    """The first worker finds a mistake before the others start; the parent ends."""
    server = LocalServer(["--corpus_path", str(tmp_path / "none"), "--workers", "3"])
    with pytest.raises(RetrieverUnavailable, match="exited with 1") as caught:
        server.start()
    assert str(caught.value).count("none") == 1


def test_2000_open_connections(server: LocalServer) -> None:
    """All are answered, and again later: the server raises its limit of open files."""
    body = json.dumps(QUERY).encode()
    head = f"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))

    async def main() -> set[bytes]:
        opened = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2000)]
        statuses = set()
        for reader, writer in opened * 2:
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", answer)
            assert length
            await reader.readexactly(int(length[1]))
            statuses.add(answer.partition(b"\r\n")[0])
        for _, writer in opened:
            writer.close()
        return statuses

    try:
        assert asyncio.run(main()) == {b"HTTP/1.1 200 OK"}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
