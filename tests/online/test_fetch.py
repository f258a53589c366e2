"""Untrusted pages: all limits hold, and no redirect or spelling leads to this machine."""

import gzip
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.online.addresses import AddressPolicy
from search_r1.online.fetch import Deadline, PageError, PageFetcher

LOCALHOST = ipaddress.ip_network("127.0.0.1/32")
HTML = {"Content-Type": "text/html; charset=utf-8"}
Fetch = Callable[..., Any]


@pytest.fixture
def fetcher() -> Iterator[Callable[..., PageFetcher]]:
    """Yield a function that makes fetchers for a port; 127.0.0.1 is the only allowed network."""
    made: list[PageFetcher] = []

    def make(
        port: int, max_bytes: int = 10_000, allow_local: bool = True, timeout: float = 5.0
    ) -> Any:
        policy = AddressPolicy(frozenset({port}), (LOCALHOST,) if allow_local else ())
        made.append(PageFetcher(policy, max_bytes))
        fetch = made[-1].fetch
        return SimpleNamespace(fetch=lambda url: fetch(url, Deadline(timeout)))

    yield make
    for page_fetcher in made:
        page_fetcher.close()


def test_fetches_a_page(web: Any, reply: Any, fetcher: Fetch) -> None:
    """A page has body, type and charset; the request has the host and no password."""
    server = web(
        lambda request: reply(b"<p>hello", headers={"Content-Type": 'TEXT/HTML;Charset="x"'})
    )
    page = fetcher(server.port).fetch(f"http://me:secret@127.0.0.1:{server.port}/a b?q=ü#part")
    assert (page.body, page.media_type, page.charset) == (b"<p>hello", "text/html", "x")
    request = server.requests[0]
    assert (request.path, request.params) == ("/a%20b", {"q": "ü"})
    assert request.headers["Host"] == f"127.0.0.1:{server.port}"
    assert not {"Authorization", "Cookie"} & request.headers.keys()


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("http://127.0.0.2:{port}/", "not a public address"),
        ("//127.0.0.2:{port}/", "not a public address"),
        ("http://2130706434:{port}/", "not a public address"),
        ("http://[::1]:{port}/", "not a public address"),
        ("http://[::ffff:127.0.0.2]:{port}/", "not a public address"),
        ("http://127.0.0.1:22/", "port 22"),
        ("file:///etc/passwd", "protocol 'file"),
        ("ftp://127.0.0.1/", "protocol 'ftp"),
        ("mailto:a@b", "InvalidURL"),
        ("http://a:99999999/", "port 99999999"),
    ],
)
def test_redirects_are_checked_like_pages(
    web: Any, reply: Any, fetcher: Fetch, location: str, message: str
) -> None:
    """A redirect to an address that is not allowed is an error."""
    server = web(lambda a: reply(b"", 302, {"Location": location.format(port=server.port)}))
    with pytest.raises(PageError, match=message):
        fetcher(server.port).fetch(server.url)
    assert len(server.requests) == 1


def test_redirects_are_followed_one_by_one(web: Any, reply: Any, fetcher: Fetch) -> None:
    """Up to five redirects, also relative ones, are followed; six are an error."""

    def answer(request: Any) -> Any:
        num_left = int(request.path.strip("/") or 0)
        if num_left == 0:
            return reply(b"there", headers=HTML)
        status = (301, 302, 303, 307, 308)[num_left % 5]
        return reply(b"", status, {"Location": f"../{num_left - 1}"})

    server = web(answer)
    assert fetcher(server.port).fetch(f"{server.url}/5").body == b"there"
    with pytest.raises(PageError):
        fetcher(server.port).fetch(f"{server.url}/6")


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (404, HTML, "status 404"),
        (302, HTML, "status 302"),
        (204, HTML, "status 204"),
        (200, {"Content-Type": "application/pdf"}, "type 'application/pdf'"),
        (200, {"Content-Type": "text/html-ish"}, "type 'text/html-ish'"),
        (200, {}, "type ''"),
        (200, {**HTML, "Content-Encoding": "br"}, "encoding 'br'"),
        (200, {**HTML, "Content-Encoding": "gzip"}, "DecodingError"),
        (200, {**HTML, "Content-Encoding": "gzip, gzip"}, "encoding 'gzip, gzip'"),
    ],
)
def test_only_text_pages_with_status_200_are_accepted(
    web: Any, reply: Any, fetcher: Fetch, status: int, headers: dict[str, str], message: str
) -> None:
    """Other statuses, content types and encodings are errors."""
    body = b"" if status == 204 else b"body"
    server = web(lambda request: reply(body, status, headers))
    with pytest.raises(PageError, match=message):
        fetcher(server.port).fetch(server.url)


def test_large_pages_are_truncated(web: Any, reply: Any, fetcher: Fetch) -> None:
    """Only the first bytes of a large page are read, also after decompression."""
    server = web(lambda request: reply(b"ab" * 500_000, headers=HTML))
    assert fetcher(server.port, max_bytes=1001).fetch(server.url).body == b"ab" * 500 + b"a"
    bomb = gzip.compress(b"\0" * 50_000_000)
    compressed = web(lambda request: reply(bomb, headers={**HTML, "Content-Encoding": "gzip"}))
    assert fetcher(compressed.port, max_bytes=100_000).fetch(compressed.url).body == b"\0" * 100_000


def test_compressed_pages_are_read(web: Any, reply: Any, fetcher: Fetch) -> None:
    """A gzip answer is decompressed although the request asked for no compression."""
    body = gzip.compress("<p>Grüße".encode())
    server = web(lambda request: reply(body, headers={**HTML, "Content-Encoding": "gzip"}))
    assert fetcher(server.port).fetch(server.url).body == "<p>Grüße".encode()
    assert server.requests[0].headers["Accept-Encoding"] == "identity"


def serve_raw(*parts: bytes, forever: bool = False) -> tuple[int, threading.Event]:
    """Start a raw server for one connection; returns its port and an event that stops it.

    It sends `parts`, and then, if `forever`, the last part again and again.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    done = threading.Event()

    def run() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(65536)
            try:
                for part in parts:
                    connection.sendall(part)
                while forever and not done.wait(0.01):
                    connection.sendall(parts[-1])
            except OSError:
                return  # the fetcher closed the connection, as expected

    threading.Thread(target=run, daemon=True).start()
    return listener.getsockname()[1], done


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 99999\r\n"
SLOW_RESPONSES = {
    "silence": (b"",),
    "status": (b"H",),
    "a header": (HEAD, b"x"),
    "headers": (HEAD, b"A: b\r\n"),
    "provisional responses": (b"HTTP/1.1 100 Continue\r\n\r\n",),
    "body": (HEAD + b"\r\n", b"x"),
    "chunks": (HEAD.replace(b"Content-Length: 99999", b"Transfer-Encoding: chunked") + b"\r\n",
               b"1\r\nx\r\n"),
}  # fmt: skip


@pytest.mark.parametrize("parts", SLOW_RESPONSES.values(), ids=SLOW_RESPONSES)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_one_deadline_holds_over_everything(fetcher: Fetch, scheme: str, parts: Any) -> None:
    """A server that sends a byte now and then cannot exceed the deadline of the page.

    The connection is closed afterwards.
    """
    port, done = serve_raw(*parts, forever=True)
    start = time.monotonic()
    message = "not complete within" if scheme == "http" else "not complete within|ConnectError"
    with pytest.raises(PageError, match=message):
        fetcher(port, timeout=0.2).fetch(f"{scheme}://127.0.0.1:{port}/")
    assert time.monotonic() - start < 10
    done.set()
    connections = psutil.Process().net_connections("tcp")
    assert port not in [c.raddr.port for c in connections if c.raddr]


def test_the_body_of_a_redirect_is_not_read(web: Any, reply: Any) -> None:
    """A redirect that sends its body for ever is followed at once."""
    page = web(lambda request: reply(b"there", headers=HTML))
    head = f"HTTP/1.1 302 Found\r\nLocation: {page.url}\r\nContent-Length: 999999\r\n\r\n"
    port, done = serve_raw(head.encode(), b"x", forever=True)
    fetcher = PageFetcher(AddressPolicy(frozenset({port, page.port}), (LOCALHOST,)), 1000)
    assert fetcher.fetch(f"http://127.0.0.1:{port}/", Deadline(5)).body == b"there"
    done.set()
    fetcher.close()


def test_redirects_and_lookups_share_the_deadline(
    web: Any, reply: Any, fetcher: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline includes all redirects, and the lookup of the host name."""

    def answer(request: Any) -> Any:
        time.sleep(0.1)
        return reply(b"", 302, {"Location": request.path + "x"})

    server, start = web(answer), time.monotonic()
    with pytest.raises(PageError):
        fetcher(server.port, timeout=0.25).fetch(server.url)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *names, **kind: time.sleep(6))
    with pytest.raises(PageError):
        fetcher(80, timeout=0.1).fetch("http://a.test/")
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "response",
    [
        b"",
        b"\x16\x03\x01 nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 99\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: nine\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 50_000,
    ],
    ids=["nothing", "no http", "short", "no number", "no chunk", "headers"],
)
def test_broken_servers_are_page_errors(fetcher: Fetch, response: bytes) -> None:
    """Any invalid response of a server is a PageError."""
    port, _ = serve_raw(response)
    with pytest.raises(PageError):
        fetcher(port).fetch(f"http://127.0.0.1:{port}/")


def test_https_is_verified(web: Any, reply: Any, fetcher: Fetch) -> None:
    """A server without TLS and a closed port are errors."""
    server = web(lambda request: reply(b"x", headers=HTML))
    with pytest.raises(PageError, match="ConnectError"):
        fetcher(server.port).fetch(f"https://127.0.0.1:{server.port}/")
    with pytest.raises(PageError, match="ConnectError"):
        fetcher(1).fetch("http://127.0.0.1:1/")


@given(st.text(max_size=30), st.sampled_from(["", "http://", "https://xn--", "http://[", "//"]))
def test_any_url_gives_a_page_or_an_error(text: str, prefix: str) -> None:
    """Any URL that cannot be resolved is a PageError, however malformed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", resolve_nothing)
        with pytest.raises(PageError):
            SHARED.fetch(prefix + text, Deadline(5))


def resolve_nothing(host: str, *more: Any, **kind: Any) -> Any:
    """Replace the resolver of the system; fails for all names."""
    str(host).encode("idna")  # raises the same errors as the real resolver
    raise socket.gaierror("unknown")


SHARED = PageFetcher(AddressPolicy(), 1000)
