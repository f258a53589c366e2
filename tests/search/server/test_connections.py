"""Connections of a real server: heads, times, numbers, and the port that two servers want."""

import asyncio
import contextlib
import json
import logging
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import cast

import pytest
import uvicorn

from search_r1.search.errors import SetupError
from search_r1.search.server import connections, running
from search_r1.search.server.app import create_app
from search_r1.search.server.connections import MAX_HEADERS, configure, num_connections
from search_r1.search.server.running import bind, listen
from tests.search.server.engines import Watched

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
LIMIT = 1000
"""Bytes of a body."""


@contextlib.contextmanager
def served() -> Iterator[int]:
    """The port of a server with our protocol."""
    server = uvicorn.Server(configure(create_app(Watched()), LIMIT, 1))
    with bind("127.0.0.1", 0) as bound:
        listen(bound)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def exchange(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """The status line that follows these bytes; nothing where the server just closes."""
    with socket.create_connection(("127.0.0.1", port), 20) as client:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
                time.sleep(pause)
            return client.recv(100).partition(b"\r\n")[0]
        return b""


NUM_BYTES = 16 << 20
"""An answer has more, and no system's buffers have room for so many."""


@contextlib.contextmanager
def long_answer(port: int) -> Iterator[socket.socket]:
    """A client that asked for it."""
    queries = [f"{i}" + "a" * 85 for i in range(600)]
    body = json.dumps({"queries": queries, "topk": 100}).encode()
    head = f"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        client.settimeout(20)
        client.connect(("127.0.0.1", port))
        client.sendall(head.encode() + body)
        yield client


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served() as port:
        yield port


OK, BAD = b"HTTP/1.1 200 OK", b"HTTP/1.1 400 Bad Request"
POST = b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([HEAD + b"\r\n"], OK),
        ([b"\r\n", HEAD[:5], HEAD[5:], b"\r\n"], OK),
        ([HEAD + b"A: b\r\n" * (MAX_HEADERS - 1) + b"\r\n"], OK),
        ([HEAD + b"A: b\r\n" * MAX_HEADERS + b"\r\n"], BAD),
        ([HEAD + b"A: b\r\n" * 100_000 + b"\r\n"], BAD),
        ([HEAD + b"A: ", *[b"b" * 10_000] * 40], BAD),
        ([HEAD + b"A" * 300_000 + b": b\r\n\r\n"], BAD),
        ([b"GET /" + b"a" * 400_000 + b" HTTP/1.1\r\n\r\n"], BAD),
        ([POST, *[b"1;" + b"x" * 10_000 + b"\r\n{\r\n"] * 30], BAD),
        ([POST + b"1\r\n{\r\n0\r\n" + b"A: b\r\n" * MAX_HEADERS], BAD),
        ([b"\x16\x03\x01\x02"], BAD),
    ],
)  # fmt: skip
def test_heads(port: int, parts: list[bytes], expected: bytes) -> None:
    """Their number and size are bounded, trailers and chunks' own words too."""
    assert exchange(port, *parts) in (expected, b"" if expected is BAD else expected)


@pytest.mark.parametrize(
    "parts",
    [[], [b"G"], [b"\r\n"] * 9, [HEAD] + [b"A: b\r\n"] * 9, [HEAD + b"\r\n"] + [b"\r\n"] * 9],
)
def test_a_head_that_does_not_end(monkeypatch: pytest.MonkeyPatch, parts: list[bytes]) -> None:
    """Its connection is closed after the seconds allowed, however it drips, also the second one."""
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    with served() as port, socket.create_connection(("127.0.0.1", port), 20) as client:
        start = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
                time.sleep(0.05)
            while client.recv(1000):
                pass
        assert time.monotonic() - start < 5


def test_a_slow_request_is_none_of_a_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a body that takes longer than a head may, nor a pause between two requests."""
    monkeypatch.setattr(connections, "HEAD_S", 0.1)
    body = b'{"queries": ["a"]}'
    head = f"POST /retrieve HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with served() as port, socket.create_connection(("127.0.0.1", port), 20) as client:
        for _ in range(2):
            client.sendall(head)
            time.sleep(0.3)
            client.sendall(body)
            assert client.recv(10_000).startswith(OK)
            time.sleep(0.3)


@pytest.mark.parametrize("pause", [0.02, 30.0])
def test_a_client_that_does_not_take_its_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pause: float
) -> None:
    """Its connection ends after the seconds allowed, also if it reads a little now and then."""
    monkeypatch.setattr(connections, "SEND_S", 0.5)
    connections.logger.filters[0].__init__()  # type: ignore[misc]
    with served() as port, long_answer(port) as client:
        ended, taken = time.monotonic() + 10, 0
        while "take its answer" not in caplog.text and time.monotonic() < ended:
            taken += len(client.recv(1000)) if pause < 1 else 0
            time.sleep(0.02)
        with contextlib.suppress(ConnectionError):
            while data := client.recv(1 << 20):
                taken += len(data)
    assert caplog.text.count("did not take its answer within 0.5 s") == 1
    assert taken < NUM_BYTES


def test_a_client_that_is_slow_takes_all_of_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts is how long an answer waits, not how long it takes in all."""
    monkeypatch.setattr(connections, "SEND_S", 10.0)
    with served() as port, long_answer(port) as client:
        taken, end = 0, b""
        while not end.endswith(b"\r\n0\r\n\r\n"):
            data = client.recv(1 << 20)
            assert data
            taken, end = taken + len(data), (end + data)[-10:]
            time.sleep(0.0005)
        assert taken > NUM_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_USER_TIMEOUT")
@pytest.mark.parametrize("size", [1 << 10, 1 << 24])
def test_a_closed_connection_whose_peer_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The system ends it: closing waits for what is buffered, for ever."""
    monkeypatch.setattr(running, "SEND_S", 0.5)
    ended = threading.Event()

    class Closing(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            writing = cast(asyncio.WriteTransport, transport)  # uvloop's own kind is no subclass
            writing.write(b"a" * size)
            writing.close()

        def connection_lost(self, error: Exception | None) -> None:
            ended.set()

    async def main() -> None:
        with bind("127.0.0.1", 0) as bound, socket.socket() as client:
            listen(bound)
            async with await asyncio.get_running_loop().create_server(Closing, sock=bound):
                await asyncio.to_thread(client.connect, bound.getsockname())
                assert await asyncio.to_thread(ended.wait, 20)

    asyncio.run(main())


def test_connections_beyond_the_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """503 with one line in the log, however many they are; there is room again when some leave."""
    monkeypatch.setattr(connections, "num_connections", lambda: 5)
    connections.logger.filters[0].__init__()  # type: ignore[misc]
    with served() as port, caplog.at_level(logging.WARNING), contextlib.ExitStack() as stack:
        for _ in range(5):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            client.sendall(HEAD + b"\r\n")
            assert client.recv(1000).startswith(OK)
        for _ in range(20):
            assert exchange(port) == b"HTTP/1.1 503 Service Unavailable"
        stack.close()
        deadline = time.monotonic() + 10
        while exchange(port, HEAD + b"\r\n") != OK:
            assert time.monotonic() < deadline
    assert [r.getMessage() for r in caplog.records if "5 connections" in r.getMessage()] == [
        connections.FULL_TEXT % 5
    ]


def test_the_limit_of_descriptors_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """To what is allowed, never beyond, and some are kept for files."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: told.append(limits))
    for soft, hard, most in [(1024, 4096, 4096), (512, -1, 65_536), (100_000, 100_000, 100_000)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft, hard=hard: (soft, hard))
        assert most - 1000 < num_connections() < most
    assert told == [(4096, 4096), (65_536, -1)]


def test_one_port_has_one_server() -> None:
    """Two may be bound to it, as neither listens while it loads; the second to listen is told."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            assert listen(first) == f"127.0.0.1:{port}"
            with pytest.raises(SetupError, match="another --port"):
                listen(second)
