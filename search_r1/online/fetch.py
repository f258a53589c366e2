"""A page of a stranger, fetched with limits: addresses, time, size, redirects and types."""

import ssl
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx

from search_r1.exchange import decompress
from search_r1.online.addresses import AddressPolicy, AddressRefused

MOST_REDIRECTS = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})
NUM_LOOKUPS = 16
"""Names that are resolved at once; the system's resolver knows no deadline, so a thread waits."""
TYPES = ("text/html", "text/plain")
HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; search-r1)",
    "Accept": "text/html, text/plain;q=0.9",
    "Accept-Encoding": "identity",
}
FAILURES = (
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
    AddressRefused,
    OSError,
)


class PageError(Exception):
    """A page that cannot be had, or that is not text."""


class Deadline:
    """The end of all that is done for a page, or for the pages of a search."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that are left; raises PageError where none are."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise PageError(self.said)
        return left

    @property
    def said(self) -> str:
        """What a page says that is not there by then."""
        return f"not complete within {self.seconds:g} s"


@dataclass(frozen=True)
class Page:
    """What a page's server sent: at most the first bytes, its type and declared charset."""

    body: bytes
    media_type: str
    charset: str | None


class PageFetcher:
    """Fetches pages without proxies and cookies; safe to use from several threads."""

    def __init__(self, policy: AddressPolicy, most_bytes: int) -> None:
        """`most_bytes` of a page are read."""
        self._policy = policy
        self._most_bytes = most_bytes
        self._tls = httpcore.default_ssl_context()
        self._lookups = ThreadPoolExecutor(NUM_LOOKUPS, thread_name_prefix="lookup")

    def fetch(self, url: str, deadline: Deadline) -> Page:
        """The page at `url` or where it redirects to, before `deadline`; raises PageError."""
        backend = _Backend(self._policy, self._lookups, deadline)
        for _ in range(MOST_REDIRECTS + 1):
            try:
                with httpcore.ConnectionPool(self._tls, network_backend=backend) as connection:
                    answer = self._get(connection, _parse(url))
            except (httpcore.TimeoutException, TimeoutError) as error:
                raise PageError(deadline.said) from error
            except FAILURES as error:
                raise PageError(f"{type(error).__name__}: {error}") from error
            if isinstance(answer, Page):
                return answer
            url = answer
        raise PageError(f"more than {MOST_REDIRECTS} redirects")

    def close(self) -> None:
        """Let go of threads; a lookup that is under way ends by itself."""
        self._lookups.shutdown(wait=False, cancel_futures=True)

    def _get(self, connection: httpcore.ConnectionPool, url: httpx.URL) -> Page | str:
        """The page, or the address that it redirects to."""
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        headers = [*HEADERS.items(), ("Host", url.netloc.decode())]
        with connection.stream("GET", target, headers=headers) as response:
            fields = httpx.Headers(response.headers)
            if response.status in REDIRECTS and "Location" in fields:
                return str(_parse(fields["Location"], url))
            if response.status != 200:
                raise PageError(f"status {response.status}")
            media_type, charset = _content_type(fields)
            body = bytearray()
            for chunk in response.iter_stream():
                body += chunk
                if len(body) >= self._most_bytes:
                    break
        packed, encoding = bytes(body[: self._most_bytes]), fields.get("Content-Encoding", "")
        try:
            return Page(decompress(packed, encoding, self._most_bytes), media_type, charset)
        except ValueError as error:
            raise PageError(str(error)) from error


class _Backend(httpcore.SyncBackend):
    """Connections of httpcore to addresses that the policy has checked; TLS is to the name."""

    def __init__(
        self, policy: AddressPolicy, lookups: ThreadPoolExecutor, deadline: Deadline
    ) -> None:
        self._policy = policy
        self._lookups = lookups
        self._deadline = deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """A connection to the first address that answers; raises AddressRefused."""
        failure: Exception | None = None
        lookup = self._lookups.submit(self._policy.resolve, host, port)
        for address in lookup.result(self._deadline.left()):
            try:
                stream = super().connect_tcp(
                    address, port, self._deadline.left(), local_address, socket_options
                )
                return _Stream(stream, self._deadline)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure or AddressRefused(f"{host!r} has no address")

    def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Never: a page is not on this machine."""
        raise AddressRefused(f"unix socket {path!r}")


class _Stream(httpcore.NetworkStream):
    """A connection whose every step ends with the deadline: else each byte would start it anew."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._deadline.left())

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._deadline.left())

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        left = self._deadline.left()
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, left), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _parse(url: str, base: httpx.URL | None = None) -> httpx.URL:
    """An address of the web, relative to `base`; raises PageError."""
    try:
        parsed = base.join(url) if base else httpx.URL(url)
        host = parsed.host  # decodes, which not every name survives
    except (httpx.InvalidURL, ValueError) as error:
        raise PageError(f"no address: {error}") from error
    if parsed.scheme not in ("http", "https") or not host:
        raise PageError(f"scheme {parsed.scheme!r}; pages are fetched by http and https")
    return parsed


def _content_type(fields: httpx.Headers) -> tuple[str, str | None]:
    """Media type and charset; raises PageError for what is not text."""
    media_type, *parameters = (part.strip() for part in fields.get("Content-Type", "").split(";"))
    if media_type.lower() not in TYPES:
        raise PageError(f"type {media_type!r}; pages are {' or '.join(TYPES)}")
    pairs: dict[str, Any] = {p.partition("=")[0].lower(): p.partition("=")[2] for p in parameters}
    return media_type.lower(), pairs.get("charset", "").strip("\"'") or None
