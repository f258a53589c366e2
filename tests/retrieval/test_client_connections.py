"""Connections that open slowly or break silently, invalid responses, and proxies."""

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from search_r1.retrieval import client as client_module
from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.errors import RetrieverRefused, RetrieverUnavailable
from search_r1.retrieval.protocol import RETRIED, count_retries
from tests.apps import running

EMPTY = b'{"result":[[]]}'
DOCUMENT = b'{"document": {"id": "1", "contents": "t\\nx"}}'


class FixedResponses:
    """An application that sends the bodies in turn, the last one repeatedly, with one status."""

    def __init__(self, *bodies: bytes, status: int = 200) -> None:
        self.bodies, self.status = list(bodies), status
        self.num_asked = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        self.num_asked += 1
        body = self.bodies.pop(0) if len(self.bodies) > 1 else self.bodies[0]
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": self.status, "headers": [length]})
        await send({"type": "http.response.body", "body": body})


def ask(url: str, call: Callable[[RetrievalClient], Awaitable[Any]], **options: Any) -> Any:
    """Return the result of a call of a client in a new event loop."""

    async def play() -> Any:
        async with RetrievalClient(url, 1, backoff=0.01, **options) as client:
            return await call(client)

    return asyncio.run(play())


CALLS: dict[str, tuple[Callable[[RetrievalClient], Awaitable[Any]], bytes]] = {
    "search": (lambda client: client.search("q"), EMPTY),
    "document": (lambda client: client.document("1"), DOCUMENT),
}
INVALID = (
    b"", b"<html>", b"null", b"7", b'"x"', b"[]", b"{}", b'{"result": 7}', b'{"result": null}',
    b'{"result": []}', b'{"result": [[], []]}', b'{"result": [7]}', b'{"result": [[7]]}',
    b'{"result": [[null]]}', b'{"result": [[{"document": 7}]]}', b'{"document": 7}',
    b'{"result": [[{"document": {"id": [1], "contents": "x"}}]]}', b'{"document": null}',
    b'{"document": {"id": 1}}', b'{"document": {"id": true, "contents": "x"}}', b"[" * 50_000,
)  # fmt: skip
"""Response bodies that no retrieval server sends."""


@pytest.mark.parametrize("name", CALLS)
def test_an_invalid_response_is_requested_once_more(name: str) -> None:
    """One invalid response causes a second attempt; two in a row are an error with the reason."""
    call, good = CALLS[name]
    with running(app := FixedResponses()) as url:
        for invalid in INVALID:
            app.bodies, app.num_asked = [invalid, good], 0
            with count_retries() as counts:
                ask(url, call)
            assert app.num_asked == 2 and counts[RETRIED] == int(name == "search"), invalid
        app.bodies, app.num_asked = [b"<html>\r\n\x1b[2J"], 0
        with pytest.raises(RetrieverRefused) as caught:
            ask(url, call)
    assert app.num_asked == 2 and url in str(caught.value) and str(caught.value).isprintable()


def test_an_invalid_response_is_requested_from_another_server() -> None:
    """If one of two servers sends invalid responses, the other one is asked."""
    with running(FixedResponses(b"<html>")) as one, running(FixedResponses(EMPTY)) as other:
        for _ in range(4):  # each client prefers one of the two
            assert ask(f"{one},{other}", CALLS["search"][0]) == []


def http(headers: bytes = b"", status: bytes = b"200 OK", body: bytes = b"") -> bytes:
    return b"HTTP/1.1 %b\r\n%b\r\n%b" % (status, headers, body)


RAW = (
    b"", b"\0" * 100, b"SSH-2.0-OpenSSH_9\r\n", b"\x16\x03\x01\x02\x00", b"HTTP/1.1\r\n\r\n",
    b"HTTP/1.1 abc OK\r\n\r\n", b"HTTP/1.1 99999 OK\r\n\r\n", b"HTTP/9.9 200 OK\r\n\r\n",
    http(b"Content-Length: -1\r\n"), http(b"Content-Length: abc\r\n"),
    http(b"Content-Length: 99999999999999999999\r\n", body=b"{}"),
    http(b"Transfer-Encoding: chunked\r\n", body=b"zz\r\n"),
    http(b"Transfer-Encoding: chunked\r\n", body=b"-5\r\nabc\r\n0\r\n\r\n"),
    *(http(b"Content-Encoding: %b\r\nContent-Length: 3\r\n" % name, body=b"abc")
      for name in (b"gzip", b"deflate", b"br", b"zstd", b"x")),
    http(b"X: " + b"a" * 100_000 + b"\r\n"), http(b"Bad Header\r\n"), http(b": x\r\n"),
    http(b"Content-Length: 4\r\nContent-Type: x; charset=nonsense\r\n", body=b"\xff\xfe\xfd\xfc"),
    http(b"Content-Length: 6000\r\n", body=b"[" + b"1" * 5998 + b"]"),
    http(b"Location: ::::\r\nContent-Length: 0\r\n", b"301 Moved"),
    http(b"Retry-After: Tue, 99 Foo 99999 00:00:00 GMT\r\nContent-Length: 0\r\n", b"503 x"),
    http(b"Retry-After: 9e999\r\nContent-Length: 0\r\n", b"429 x"),
    http(b"Set-Cookie: \xff=\xfe; a\r\nContent-Length: 0\r\n", b"500 x"),
    *(http(b"Content-Length: 0\r\n", b"%d x" % status)
      for status in (100, 101, 204, 304, 402, 407, 418, 451, 599, 600, 999)),
)  # fmt: skip
"""Bytes from a port of another program, or from a broken server."""


async def from_raw(answer: bytes) -> BaseException | list[Any]:
    """Return the result of a search at a server that writes these bytes and disconnects."""

    async def write(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(write, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        options = {"timeout": 5.0, "max_retries": 1, "backoff": 0.01, "max_retry_after": 0.1}
        async with RetrievalClient(url, **options) as client:  # type: ignore[arg-type]
            [result] = await asyncio.gather(client.search("q"), return_exceptions=True)
            return result


def test_any_bytes_from_a_port_are_reported_in_one_line() -> None:
    """Each is a typed error of one printable line, not documents or an error of a library."""

    async def play() -> list[BaseException | list[Any]]:
        return await asyncio.gather(*map(from_raw, RAW))

    for answer, result in zip(RAW, asyncio.run(play()), strict=True):
        assert isinstance(result, RetrieverRefused | RetrieverUnavailable), (answer[:80], result)
        assert str(result).isprintable(), answer[:80]


@pytest.mark.parametrize("name", [*CALLS, "health"])
def test_every_call_ends_at_the_deadline(name: str) -> None:
    """With a silent server, a call ends at its deadline, not before, whatever the timeout."""

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    call = CALLS[name][0] if name in CALLS else RetrievalClient.health
    start = time.monotonic()
    with running(silent) as url, pytest.raises(RetrieverUnavailable):
        ask(url, call, timeout=60.0, deadline=0.3)
    assert 0.25 < time.monotonic() - start < 30


@pytest.mark.parametrize("num_servers", [1, 2])
def test_each_server_is_asked_for_its_health_once(num_servers: int) -> None:
    """A health check reports the current state and makes no retries."""
    apps = [FixedResponses(b"busy", status=503) for _ in range(num_servers)]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(running(app)) for app in apps]
        with pytest.raises(RetrieverUnavailable):
            ask(",".join(urls), RetrievalClient.health, max_retries=5)
    assert [app.num_asked for app in apps] == [1] * num_servers


def test_an_unclosed_client_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """For example in a notebook, where nobody closes it when the event loop ends."""

    async def play(url: str) -> None:
        await RetrievalClient(url, 1).search("q")

    with running(FixedResponses(EMPTY)) as url:
        asyncio.run(play(url))
        gc.collect()
    assert "nclosed" not in caplog.text


def test_a_connection_that_does_not_open_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that answers no SYN does not use up the timeout of an attempt."""
    monkeypatch.setattr(client_module, "CONNECT_S", 0.2)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        held = [socket.socket() for _ in range(4)]
        for client in held:  # the queue is full: the kernel drops further connections
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        start = time.monotonic()
        with pytest.raises(RetrieverUnavailable):
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            ask(url, CALLS["search"][0], max_retries=0, timeout=60.0)
        assert (
            time.monotonic() - start < 8
        )  # or the kernel gives up, DEAD_PEER_S after the first SYN
        for client in held:
            client.close()


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"])
def test_proxies_in_the_environment_are_ignored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The retriever is in the local network; a proxy would see the token and every query."""
    for other in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(other, raising=False)
    with running(proxy := FixedResponses(EMPTY)) as there, running(FixedResponses(EMPTY)) as url:
        monkeypatch.setenv(name, there)
        assert ask(url, CALLS["search"][0], max_retries=0) == []
    assert proxy.num_asked == 0


def test_a_query_is_sent_while_one_of_its_searches_waits() -> None:
    """Of two equal searches one is cancelled before the request is sent; the other succeeds."""

    async def play(client: RetrievalClient) -> list[Any]:
        first, second = (asyncio.create_task(client.search("q")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        return await asyncio.wait_for(second, 20)

    with running(app := FixedResponses(EMPTY)) as url:
        assert ask(url, play) == []
    assert app.num_asked == 1
