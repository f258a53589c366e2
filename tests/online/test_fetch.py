"""Pages of strangers: every limit holds, and no redirect or spelling leads into this machine."""

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

HERE = ipaddress.ip_network("127.0.0.1/32")
HTML = {"Content-Type": "text/html; charset=utf-8"}
Fetch = Callable[..., Any]


@pytest.fixture
def fetcher() -> Iterator[Callable[..., PageFetcher]]:
    """Makes fetchers for a server's port; only 127.0.0.1 is allowed beside public addresses."""
    made: list[PageFetcher] = []

    def make(port: int, most_bytes: int = 10_000, here: bool = True, timeout: float = 5.0) -> Any:
        policy = AddressPolicy(frozenset({port}), (HERE,) if here else ())
        made.append(PageFetcher(policy, most_bytes))
        fetch = made[-1].fetch
        return SimpleNamespace(fetch=lambda url: fetch(url, Deadline(timeout)))

    yield make
    for one in made:
        one.close()


def test_fetches_a_page(web: Any, reply: Any, fetcher: Fetch) -> None:
    """Body, type and charset arrive; the request names the host and carries no password."""
    server = web(
        lambda asked: reply(b"<p>hello", headers={"Content-Type": 'TEXT/HTML;Charset="x"'})
    )
    page = fetcher(server.port).fetch(f"http://me:secret@127.0.0.1:{server.port}/a b?q=ü#part")
    assert (page.body, page.media_type, page.charset) == (b"<p>hello", "text/html", "x")
    asked = server.asked[0]
    assert (asked.path, asked.params) == ("/a%20b", {"q": "ü"})
    assert asked.headers["Host"] == f"127.0.0.1:{server.port}"
    assert not {"Authorization", "Cookie"} & asked.headers.keys()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "2130706433",
        "0x7f.1",
        "127.1",
        "0.0.0.0",
        "localhost",
        "[::1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
    ],
)
def test_this_machine_is_refused_in_every_spelling(
    web: Any, reply: Any, fetcher: Fetch, host: str
) -> None:
    """Directly and by a redirect from an allowed page: nothing reaches the server."""
    server = web(lambda asked: reply(b"secret", headers=HTML))
    url = f"http://{host}:{server.port}/"
    with pytest.raises(PageError, match="AddressRefused"):
        fetcher(server.port, here=False).fetch(url)
    assert server.asked == []


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("http://127.0.0.2:{port}/", "not a public address"),
        ("//127.0.0.2:{port}/", "not a public address"),
        ("http://2130706434:{port}/", "not a public address"),
        ("http://[::1]:{port}/", "not a public address"),
        ("http://[::ffff:127.0.0.2]:{port}/", "not a public address"),
        ("http://127.0.0.1:22/", "port 22"),
        ("file:///etc/passwd", "scheme 'file'"),
        ("ftp://127.0.0.1/", "scheme 'ftp'"),
        ("mailto:a@b", "scheme 'mailto'"),
        ("http://a:99999999/", "port 99999999"),
    ],
)
def test_redirects_are_checked_like_pages(
    web: Any, reply: Any, fetcher: Fetch, location: str, said: str
) -> None:
    """An allowed page cannot send the fetcher where it could not go itself."""
    server = web(lambda a: reply(b"", 302, {"Location": location.format(port=server.port)}))
    with pytest.raises(PageError, match=said):
        fetcher(server.port).fetch(server.url)
    assert len(server.asked) == 1


def test_redirects_are_followed_one_by_one(web: Any, reply: Any, fetcher: Fetch) -> None:
    """Five redirects, relative ones too, lead to the page; the sixth is one too many."""

    def answer(asked: Any) -> Any:
        left = int(asked.path.strip("/") or 0)
        if left == 0:
            return reply(b"there", headers=HTML)
        return reply(b"", (301, 302, 303, 307, 308)[left % 5], {"Location": f"../{left - 1}"})

    server = web(answer)
    assert fetcher(server.port).fetch(f"{server.url}/5").body == b"there"
    with pytest.raises(PageError, match="more than 5 redirects"):
        fetcher(server.port).fetch(f"{server.url}/6")


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (404, HTML, "status 404"),
        (302, HTML, "status 302"),
        (204, HTML, "status 204"),
        (200, {"Content-Type": "application/pdf"}, "type 'application/pdf'"),
        (200, {"Content-Type": "text/html-ish"}, "type 'text/html-ish'"),
        (200, {}, "type ''"),
        (200, {**HTML, "Content-Encoding": "br"}, "encoding 'br'"),
        (200, {**HTML, "Content-Encoding": "gzip"}, "broken gzip"),
    ],
)
def test_only_good_text_pages(
    web: Any, reply: Any, fetcher: Fetch, status: int, headers: dict[str, str], said: str
) -> None:
    """Errors, other types and encodings that were not asked for are typed errors."""
    body = b"" if status == 204 else b"body"
    server = web(lambda asked: reply(body, status, headers))
    with pytest.raises(PageError, match=said):
        fetcher(server.port).fetch(server.url)


def test_large_pages_are_cut(web: Any, reply: Any, fetcher: Fetch) -> None:
    """Of a large page, plain or compressed to little, only the first bytes are read."""
    server = web(lambda asked: reply(b"ab" * 500_000, headers=HTML))
    assert fetcher(server.port, most_bytes=1001).fetch(server.url).body == b"ab" * 500 + b"a"
    bomb = gzip.compress(b"\0" * 50_000_000)
    packed = web(lambda asked: reply(bomb, headers={**HTML, "Content-Encoding": "gzip"}))
    assert fetcher(packed.port, most_bytes=100_000).fetch(packed.url).body == b"\0" * 100_000


def test_compressed_pages_are_read(web: Any, reply: Any, fetcher: Fetch) -> None:
    """A server that compresses though it was not asked to is understood."""
    body = gzip.compress("<p>Grüße".encode())
    server = web(lambda asked: reply(body, headers={**HTML, "Content-Encoding": "gzip"}))
    assert fetcher(server.port).fetch(server.url).body == "<p>Grüße".encode()
    assert server.asked[0].headers["Accept-Encoding"] == "identity"


def speak(*parts: bytes, forever: bool = False) -> tuple[int, threading.Event]:
    """A raw server for one connection: sends `parts`, then the last again and again or nothing."""
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
                return  # the fetcher has gone, as it should

    threading.Thread(target=run, daemon=True).start()
    return listener.getsockname()[1], done


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 99999\r\n"
DRIPS = {
    "silence": (b"",),
    "status": (b"H",),
    "a header": (HEAD, b"x"),
    "headers": (HEAD, b"A: b\r\n"),
    "provisional answers": (b"HTTP/1.1 100 Continue\r\n\r\n",),
    "body": (HEAD + b"\r\n", b"x"),
    "chunks": (HEAD.replace(b"Content-Length: 99999", b"Transfer-Encoding: chunked") + b"\r\n",
               b"1\r\nx\r\n"),
}  # fmt: skip


@pytest.mark.parametrize("parts", DRIPS.values(), ids=DRIPS)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_one_deadline_holds_over_everything(fetcher: Fetch, scheme: str, parts: Any) -> None:
    """A byte now and then keeps every read alive, but not the page as a whole; the connection is
    closed with it."""
    port, done = speak(*parts, forever=True)
    start = time.monotonic()
    said = "not complete within|ConnectError"  # what drips is no TLS
    with pytest.raises(PageError, match=said[:19] if scheme == "http" else said):
        fetcher(port, timeout=0.2).fetch(f"{scheme}://127.0.0.1:{port}/")
    assert time.monotonic() - start < 2
    done.set()
    left = [c.raddr for c in psutil.Process().net_connections("tcp") if c.raddr]
    assert port not in [there.port for there in left]


def test_redirects_and_lookups_share_the_deadline(
    web: Any, reply: Any, fetcher: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow redirects add up, and a name whose server is silent is given up."""

    def answer(asked: Any) -> Any:
        time.sleep(0.1)
        return reply(b"", 302, {"Location": asked.path + "x"})

    server, start = web(answer), time.monotonic()
    with pytest.raises(PageError, match="not complete within"):
        fetcher(server.port, timeout=0.25).fetch(server.url)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *names, **kind: time.sleep(3))
    with pytest.raises(PageError, match="not complete within"):
        fetcher(80, timeout=0.1).fetch("http://a.test/")
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "said",
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
def test_broken_servers_are_typed_errors(fetcher: Fetch, said: bytes) -> None:
    """Whatever a server sends, a page that fails is a PageError and nothing else."""
    port, _ = speak(said)
    with pytest.raises(PageError):
        fetcher(port).fetch(f"http://127.0.0.1:{port}/")


def test_https_is_verified(web: Any, reply: Any, fetcher: Fetch) -> None:
    """A server that speaks no TLS, or nobody at the port, is a typed error."""
    server = web(lambda asked: reply(b"x", headers=HTML))
    with pytest.raises(PageError, match="ConnectError"):
        fetcher(server.port).fetch(f"https://127.0.0.1:{server.port}/")
    with pytest.raises(PageError, match="ConnectError"):
        fetcher(1).fetch("http://127.0.0.1:1/")


NO_ADDRESSES = (
    """
 |page|javascript:alert(1)|data:text/html,x|http://|https://|http:///x|file:///etc/passwd|gopher://a/
ftp://a/|//a/|http:a|http://xn--/|http://xn--a/|http://xn--\u00fc/|https://a.xn--/|http://xn--0/
http://[::1|http://::1/|http://[::1%25lo]/|http://[g::]/|http://a b/|http://a\tb/|http://a\x00/
http://a:b/|http://a:-1/|http://a:65536/|http://a:99999999999/|http://.../|http://./|http://a..b/
http://%00/|http://%zz/|http://\ud800/|http://\u2024/|http://\uff0e/|http://*/|http://_/|http://-/
http://a@b@c/|http://@/|http://:80/|http://:@:/|http://1.2.3.4.5/|http://256.1.1.1/|http://0x/
http://127.0.0.1.xn--/|http://\u3002/|http://\u00df/\ud800|http://a/\x7f|\x00|\n|http://\u0660/
""".replace("\n", "|")
    .strip("|")
    .split("|")
)


@pytest.mark.parametrize("url", [*NO_ADDRESSES, f"http://{'a' * 300}/", f"http://{'a.' * 99}"])
def test_what_is_no_web_address_is_refused(
    fetcher: Fetch, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result without a web address is a typed error, directly and by a redirect."""
    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    with pytest.raises(PageError):
        fetcher(80).fetch(url)


@given(st.text(max_size=30), st.sampled_from(["", "http://", "https://xn--", "http://[", "//"]))
def test_no_address_breaks_the_fetcher(start: str, rest: str) -> None:
    """Whatever a service gives as an address, there is a page or a PageError."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", nowhere)
        with pytest.raises(PageError):
            SHARED.fetch(rest + start, Deadline(5))


def nowhere(host: str, *more: Any, **kind: Any) -> Any:
    """A resolver that knows no name, since no test asks the real one."""
    str(host).encode("idna")  # as the real one does
    raise socket.gaierror("unknown")


SHARED = PageFetcher(AddressPolicy(), 1000)
