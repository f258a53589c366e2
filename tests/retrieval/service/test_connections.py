"""Connections of a real server: header limits, timeouts, their number, and a taken port."""

import asyncio
import contextlib
import errno
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

from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.service import connections, running
from search_r1.retrieval.service.app import create_app
from search_r1.retrieval.service.connections import MAX_HEADERS, configure, max_connections
from search_r1.retrieval.service.running import bind, listen
from tests.retrieval.service.fake_backends import FakeBackend

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
MAX_BODY_BYTES = 1000


@contextlib.contextmanager
def served() -> Iterator[int]:
    """Run a server with LimitedProtocol; yields its port."""
    server = uvicorn.Server(configure(create_app(FakeBackend()), MAX_BODY_BYTES, 1))
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
    """Send these bytes and return the status line; empty if the server only disconnects."""
    with socket.create_connection(("127.0.0.1", port), 20) as client:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                client.sendall(part)
                time.sleep(pause)
            return client.recv(100).partition(b"\r\n")[0]
        return b""


NUM_BYTES = 16 << 20
"""Less than the long response has, and more than the system's socket buffers hold."""


@contextlib.contextmanager
def long_response(port: int) -> Iterator[socket.socket]:
    """Connect and request the long response; yields the client's socket."""
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
def test_header_limits(port: int, parts: list[bytes], expected: bytes) -> None:
    """Number and size of headers are limited, including trailers and chunk extensions."""
    assert exchange(port, *parts) in (expected, b"" if expected is BAD else expected)


@pytest.mark.parametrize(
    "parts",
    [[], [b"G"], [b"\r\n"] * 9, [HEAD] + [b"A: b\r\n"] * 9, [HEAD + b"\r\n"] + [b"\r\n"] * 9],
)
def test_headers_that_do_not_end(monkeypatch: pytest.MonkeyPatch, parts: list[bytes]) -> None:
    """Incomplete headers end the connection after HEAD_S, also those of a second request."""
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


def test_slow_bodies_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """HEAD_S limits neither the time of a body nor the pause between two requests."""
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
def test_a_client_that_does_not_read_its_response(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pause: float
) -> None:
    """Its connection is closed after SEND_S, even if it reads a little from time to time."""
    monkeypatch.setattr(connections, "SEND_S", 0.5)
    connections.logger.filters[0].__init__()  # type: ignore[misc]
    with served() as port, long_response(port) as client:
        ended, taken = time.monotonic() + 10, 0
        while "read its response" not in caplog.text and time.monotonic() < ended:
            taken += len(client.recv(1000)) if pause < 1 else 0
            time.sleep(0.02)
        with contextlib.suppress(ConnectionError):
            while data := client.recv(1 << 20):
                taken += len(data)
    assert caplog.text.count("did not read its response within 0.5 s") == 1
    assert taken < NUM_BYTES


def test_a_slow_client_gets_its_whole_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """SEND_S limits the time that a response waits, not its total time."""
    monkeypatch.setattr(connections, "SEND_S", 10.0)
    with served() as port, long_response(port) as client:
        taken, end = 0, b""
        while not end.endswith(b"\r\n0\r\n\r\n"):
            data = client.recv(1 << 20)
            assert data
            taken, end = taken + len(data), (end + data)[-10:]
            time.sleep(0.0005)
        assert taken > NUM_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_USER_TIMEOUT")
@pytest.mark.parametrize("size", [1 << 10, 1 << 24])
def test_a_closed_connection_whose_peer_reads_nothing(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The operating system closes it; otherwise closing would wait forever for buffered data."""
    monkeypatch.setattr(running, "SEND_S", 0.5)
    ended = threading.Event()

    class Closing(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            writing = cast(
                asyncio.WriteTransport, transport
            )  # uvloop's transport is not a subclass
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
    """Too many connections get 503 and one log line; new ones succeed when others have closed."""
    monkeypatch.setattr(connections, "max_connections", lambda: 5)
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
        connections.FULL_MESSAGE % 5
    ]


def test_the_limit_of_descriptors_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is raised as far as allowed, and some descriptors are kept for files."""
    limits_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: limits_set.append(limits))
    for soft, hard, limit in [(1024, 4096, 4096), (512, -1, 65_536), (100_000, 100_000, 100_000)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft, hard=hard: (soft, hard))
        assert limit - 1000 < max_connections() < limit
    assert limits_set == [(4096, 4096), (65_536, -1)]


def test_a_machine_without_ipv6_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without IPv6 not even the socket can be created, which is an error with a fix."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(running.socket, "socket", refuse)
    with pytest.raises(SetupError, match=r"cannot serve on ::1:0 .*not supported.*another --host"):
        bind("::1", 0)


def test_one_port_has_one_server() -> None:
    """Two servers can bind to it before either listens; the second to listen gets an error."""
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind("127.0.0.1", port) as second:
            assert listen(first) == f"127.0.0.1:{port}"
            with pytest.raises(SetupError, match="another --port"):
                listen(second)
