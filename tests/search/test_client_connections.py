"""Connections that open slowly or end without a word, answers that are none, and proxies."""

import asyncio
import contextlib
import gc
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from search_r1.search import client as client_module
from search_r1.search import transport
from search_r1.search.client import RETRIED, RetrievalClient, count_retries
from search_r1.search.errors import RetrieverRefused, RetrieverUnavailable
from tests.apps import running

EMPTY = b'{"result":[[]]}'
DOCUMENT = b'{"document": {"id": "1", "contents": "t\\nx"}}'


class Says:
    """An application that gives these bodies in turn, the last for ever, with one status."""

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


def ask(url: str, what: Callable[[RetrievalClient], Awaitable[Any]], **options: Any) -> Any:
    """What a client of one event loop gets."""

    async def play() -> Any:
        async with RetrievalClient(url, 1, backoff=0.01, **options) as client:
            return await what(client)

    return asyncio.run(play())


ASKED: dict[str, tuple[Callable[[RetrievalClient], Awaitable[Any]], bytes]] = {
    "search": (lambda client: client.search("q"), EMPTY),
    "document": (lambda client: client.document("1"), DOCUMENT),
}
GARBAGE = (
    b"", b"<html>", b"null", b"7", b'"x"', b"[]", b"{}", b'{"result": 7}', b'{"result": null}',
    b'{"result": []}', b'{"result": [[], []]}', b'{"result": [7]}', b'{"result": [[7]]}',
    b'{"result": [[null]]}', b'{"result": [[{"document": 7}]]}', b'{"document": 7}',
    b'{"result": [[{"document": {"id": null, "contents": "x"}}]]}', b'{"document": null}',
    b'{"document": {"id": 1}}', b'{"document": {"id": true, "contents": "x"}}', b"[" * 50_000,
)  # fmt: skip
"""Answers of types that no retrieval server gives."""


@pytest.mark.parametrize("asked", ASKED)
def test_a_garbled_answer_is_asked_for_once_more(asked: str) -> None:
    """One of any type costs a second attempt; two in a row are a fault with the reason, no more."""
    what, good = ASKED[asked]
    with running(app := Says()) as url:
        for garbage in GARBAGE:
            app.bodies, app.num_asked = [garbage, good], 0
            with count_retries() as counts:
                ask(url, what)
            assert app.num_asked == 2 and counts[RETRIED] == int(asked == "search"), garbage
        app.bodies, app.num_asked = [b"<html>\r\n\x1b[2J"], 0
        with pytest.raises(RetrieverRefused, match="outside the wire contract") as caught:
            ask(url, what)
    assert app.num_asked == 2 and url in str(caught.value) and str(caught.value).isprintable()


def test_a_garbled_answer_is_asked_for_at_another_server() -> None:
    """One of two servers lies: the other answers."""
    with running(Says(b"<html>")) as one, running(Says(EMPTY)) as other:
        for _ in range(4):  # each client prefers one of the two
            assert ask(f"{one},{other}", ASKED["search"][0]) == []


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
"""What comes of a port where something else listens, or of a server that is broken."""


async def from_raw(answer: bytes) -> BaseException | list[Any]:
    """What a search makes of a server that writes these bytes and closes."""

    async def write(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(write, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        options = {"timeout": 5.0, "max_retries": 1, "backoff": 0.01, "max_retry_after": 0.1}
        async with RetrievalClient(url, **options) as client:  # type: ignore[arg-type]
            [found] = await asyncio.gather(client.search("q"), return_exceptions=True)
            return found


def test_whatever_comes_of_a_port_is_told_in_one_line() -> None:
    """Each is a typed error of one printable line; none is documents or an error of a library."""

    async def play() -> list[BaseException | list[Any]]:
        return await asyncio.gather(*map(from_raw, RAW))

    for answer, found in zip(RAW, asyncio.run(play()), strict=True):
        assert isinstance(found, RetrieverRefused | RetrieverUnavailable), (answer[:80], found)
        assert str(found).isprintable(), answer[:80]


@pytest.mark.parametrize("asked", [*ASKED, "health"])
def test_every_question_ends_at_the_deadline(asked: str) -> None:
    """Not before it, and whatever an attempt may take, where a server is silent."""

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    what = ASKED[asked][0] if asked in ASKED else RetrievalClient.health
    start = time.monotonic()
    with running(silent) as url, pytest.raises(RetrieverUnavailable):
        ask(url, what, timeout=60.0, deadline=0.3)
    assert 0.25 < time.monotonic() - start < 30


@pytest.mark.parametrize("num_servers", [1, 2])
def test_each_server_is_asked_for_its_health_once(num_servers: int) -> None:
    """Whoever asks wants to know how things are, not to wait until they are well."""
    apps = [Says(b"busy", status=503) for _ in range(num_servers)]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(running(app)) for app in apps]
        with pytest.raises(RetrieverUnavailable):
            ask(",".join(urls), RetrievalClient.health, max_retries=5)
    assert [app.num_asked for app in apps] == [1] * num_servers


def test_what_nobody_closed_goes_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """A client in a notebook, whose loop ended with it: aiohttp would log two errors."""

    async def play(url: str) -> None:
        await RetrievalClient(url, 1).search("q")

    with running(Says(EMPTY)) as url:
        asyncio.run(play(url))
        gc.collect()
    assert "nclosed" not in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="options of Linux")
def test_a_socket_notices_a_dead_peer_by_the_system() -> None:
    """Ten seconds after a byte that nobody acknowledged, and as soon where nothing is sent."""
    address = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))
    with client_module._open_socket(address) as made:
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        names = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL")
        options = [getattr(socket, name) for name in names]
        found = [made.getsockopt(socket.IPPROTO_TCP, option) for option in options]
    assert found == [10_000, 5, 5]


def test_a_connection_that_does_not_open_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that answers no SYN does not take the whole time of an attempt."""
    monkeypatch.setattr(transport, "CONNECT_S", 0.2)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        held = [socket.socket() for _ in range(4)]
        for one in held:  # the queue is full: the kernel drops what comes after
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        start = time.monotonic()
        with pytest.raises(RetrieverUnavailable, match="does not answer"):
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            ask(url, ASKED["search"][0], max_retries=0, timeout=60.0)
        assert time.monotonic() - start < 8  # or the kernel gives up, DEAD_S after the first SYN
        for one in held:
            one.close()


CUT = """
import asyncio, os, subprocess, sys, time
from search_r1.search import client
from search_r1.search.errors import RetrieverUnavailable
from tests.apps import running

client.DEAD_S = 2
num_asked = 0

def loopback(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

async def silent(scope, receive, send):
    global num_asked
    while (await receive()).get("more_body"):
        pass
    num_asked += 1
    await asyncio.sleep(600)

async def play(url):
    async with client.RetrievalClient(url, 1, max_retries=0) as found:
        search = asyncio.create_task(found.search("q"))
        while not num_asked:
            await asyncio.sleep(0.01)
        loopback("down")
        start = time.monotonic()
        try:
            await search
        except RetrieverUnavailable:
            print("noticed" if time.monotonic() - start < 30 else "too late", flush=True)
        os._exit(0)

loopback("up")
with running(silent) as url:
    asyncio.run(play(url))
"""
ISOLATED = ["unshare", "--map-root-user", "--net"]


def test_a_connection_whose_wire_is_cut_ends_soon() -> None:
    """In a network of its own: the server has the request, and is never heard of again."""
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("no unshare or ip here")
    if subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network of one's own here")
    root = Path(__file__).parents[2]
    done = subprocess.run([*ISOLATED, sys.executable, "-c", CUT], cwd=root, capture_output=True,
                          text=True, timeout=100, check=False)  # fmt: skip
    assert done.stdout == "noticed\n", done.stderr


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"])
def test_no_proxy_of_the_environment_is_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A retriever is in the own network; a proxy would see its token and every query."""
    for other in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(other, raising=False)
    with running(proxy := Says(EMPTY)) as there, running(Says(EMPTY)) as url:
        monkeypatch.setenv(name, there)
        assert ask(url, ASKED["search"][0], max_retries=0) == []
    assert proxy.num_asked == 0


def test_a_query_is_sent_while_one_of_its_searches_waits() -> None:
    """Of two equal searches one is cancelled before the request leaves; the other is answered."""

    async def play(client: RetrievalClient) -> list[Any]:
        first, second = (asyncio.create_task(client.search("q")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        return await asyncio.wait_for(second, 20)

    with running(app := Says(EMPTY)) as url:
        assert ask(url, play) == []
    assert app.num_asked == 1
