"""Fetches untrusted pages within limits of address, time, size, redirects and content type."""

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx

from search_r1.loops import LoopThread
from search_r1.online.addresses import AddressPolicy, AddressRefused
from search_r1.online.exchange import decompress

MAX_REDIRECTS = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})
NUM_LOOKUPS = 16
"""Threads that resolve host names, since the system's resolver has no timeout."""
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
    """A page that cannot be fetched, or that has no text."""


class Deadline:
    """Time limit for all work on a page, or on the pages of a search."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        """Return the remaining seconds; raises PageError if there are none."""
        remaining = self._end - time.monotonic()
        if remaining <= 0:
            raise PageError(self.message)
        return remaining

    @property
    def message(self) -> str:
        """Error message of a page that is not complete by then."""
        return f"not complete within {self.seconds:g} s"


@dataclass(frozen=True)
class Page:
    """The first bytes of a page, with its media type and declared charset."""

    body: bytes
    media_type: str
    charset: str | None


class PageFetcher:
    """Fetches pages without proxies and cookies; safe to use from several threads.

    An event loop in a separate thread bounds the total time of a page, as in `exchange`.
    """

    def __init__(self, policy: AddressPolicy, max_bytes: int) -> None:
        """At most `max_bytes` of a page are read."""
        self._policy, self._max_bytes = policy, max_bytes
        self._tls = httpcore.default_ssl_context()
        self._lookups = ThreadPoolExecutor(NUM_LOOKUPS, thread_name_prefix="lookup")
        self._open = contextlib.ExitStack()
        self._loop = self._open.enter_context(LoopThread())

    def fetch(self, url: str, deadline: Deadline) -> Page:
        """Fetch the page at `url`, following redirects, within `deadline`; raises PageError."""
        try:
            return self._loop.run(self._fetch(url, deadline))
        except (httpcore.TimeoutException, TimeoutError) as error:
            raise PageError(deadline.message) from error
        except FAILURES as error:
            raise PageError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Stop the threads; a lookup that is running ends by itself."""
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self._open.close()

    async def _fetch(self, url: str, deadline: Deadline) -> Page:
        async with (
            contextlib.aclosing(_CheckedBackend(self._policy, self._lookups)) as backend,
            asyncio.timeout(deadline.remaining()),
        ):
            for _ in range(MAX_REDIRECTS + 1):
                async with httpcore.AsyncConnectionPool(
                    self._tls, network_backend=backend
                ) as connection:
                    page_or_url = await self._get(connection, _parse_url(url))
                if isinstance(page_or_url, Page):
                    return page_or_url
                url = page_or_url
        raise PageError(f"more than {MAX_REDIRECTS} redirects")

    async def _get(self, connection: httpcore.AsyncConnectionPool, url: httpx.URL) -> Page | str:
        """Return the page, or the URL that it redirects to."""
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        headers = [*HEADERS.items(), ("Host", url.netloc.decode())]
        async with connection.stream("GET", target, headers=headers) as response:
            fields = httpx.Headers(response.headers)
            if response.status in REDIRECTS and "Location" in fields:
                return str(_parse_url(fields["Location"], url))
            if response.status != 200:
                raise PageError(f"status {response.status}")
            media_type, charset = _content_type(fields)
            body = bytearray()
            async for chunk in response.aiter_stream():
                body += chunk
                if len(body) >= self._max_bytes:
                    break
        encoding = fields.get("Content-Encoding", "")
        try:
            content = decompress(bytes(body[: self._max_bytes]), encoding, self._max_bytes)
            return Page(content, media_type, charset)
        except ValueError as error:
            raise PageError(str(error)) from error


class _CheckedBackend(httpcore.AnyIOBackend):
    """Connects httpcore to addresses checked by the policy; TLS still verifies the host name."""

    def __init__(self, policy: AddressPolicy, lookups: ThreadPoolExecutor) -> None:
        self._policy, self._lookups = policy, lookups
        self._opened: list[httpcore.AsyncNetworkStream] = []

    async def aclose(self) -> None:
        """Close all connections: httpcore leaks one that is cancelled during its TLS handshake."""
        for stream in self._opened:
            await stream.aclose()

    async def connect_tcp(self, host: str, port: int, *more: Any, **kind: Any) -> Any:
        """Connect to the first address that answers; raises AddressRefused."""
        loop = asyncio.get_running_loop()
        failure: Exception | None = None
        for address in await loop.run_in_executor(self._lookups, self._policy.resolve, host, port):
            try:
                self._opened.append(await super().connect_tcp(address, port, *more, **kind))
                return self._opened[-1]
            except httpcore.ConnectError as error:
                failure = error
        raise failure or AddressRefused(f"{host!r} has no address")


def _parse_url(url: str, base: httpx.URL | None = None) -> httpx.URL:
    """Parse an http(s) URL, relative to `base`; raises PageError."""
    try:
        parsed = base.join(url) if base else httpx.URL(url)
        host = parsed.host  # decodes the name, which may raise an error
    except (httpx.InvalidURL, ValueError) as error:
        raise PageError(f"not an address: {error}") from error
    if parsed.scheme not in ("http", "https") or not host:
        raise PageError(f"scheme {parsed.scheme!r}; pages are fetched by http and https")
    return parsed


def _content_type(fields: httpx.Headers) -> tuple[str, str | None]:
    """Return media type and charset; raises PageError for types other than text."""
    media_type, *parameters = (part.strip() for part in fields.get("Content-Type", "").split(";"))
    if media_type.lower() not in TYPES:
        raise PageError(f"type {media_type!r}; pages must be {' or '.join(TYPES)}")
    pairs: dict[str, Any] = {p.partition("=")[0].lower(): p.partition("=")[2] for p in parameters}
    return media_type.lower(), pairs.get("charset", "").strip("\"'") or None
