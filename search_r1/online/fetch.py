"""A page of a stranger, fetched with limits: addresses, time, size, redirects and types."""

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx

from search_r1.exchange import decompress
from search_r1.loops import LoopThread
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
    """Fetches pages without proxies and cookies; safe to use from several threads.

    An event loop in a thread of its own bounds each page as a whole: a client of threads bounds
    each read alone, and a byte now and then keeps that going for hours.
    """

    def __init__(self, policy: AddressPolicy, most_bytes: int) -> None:
        """`most_bytes` of a page are read."""
        self._policy, self._most_bytes = policy, most_bytes
        self._tls = httpcore.default_ssl_context()
        self._lookups = ThreadPoolExecutor(NUM_LOOKUPS, thread_name_prefix="lookup")
        self._open = contextlib.ExitStack()
        self._loop = self._open.enter_context(LoopThread())

    def fetch(self, url: str, deadline: Deadline) -> Page:
        """The page at `url` or where it redirects to, before `deadline`; raises PageError."""
        try:
            return self._loop.run(self._fetch(url, deadline))
        except (httpcore.TimeoutException, TimeoutError) as error:
            raise PageError(deadline.said) from error
        except FAILURES as error:
            raise PageError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Let go of threads; a lookup that is under way ends by itself."""
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self._open.close()

    async def _fetch(self, url: str, deadline: Deadline) -> Page:
        async with (
            contextlib.aclosing(_Backend(self._policy, self._lookups)) as backend,
            asyncio.timeout(deadline.left()),
        ):
            for _ in range(MOST_REDIRECTS + 1):
                async with httpcore.AsyncConnectionPool(
                    self._tls, network_backend=backend
                ) as connection:
                    answer = await self._get(connection, _parse(url))
                if isinstance(answer, Page):
                    return answer
                url = answer
        raise PageError(f"more than {MOST_REDIRECTS} redirects")

    async def _get(self, connection: httpcore.AsyncConnectionPool, url: httpx.URL) -> Page | str:
        """The page, or the address that it redirects to."""
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        headers = [*HEADERS.items(), ("Host", url.netloc.decode())]
        async with connection.stream("GET", target, headers=headers) as response:
            fields = httpx.Headers(response.headers)
            if response.status in REDIRECTS and "Location" in fields:
                return str(_parse(fields["Location"], url))
            if response.status != 200:
                raise PageError(f"status {response.status}")
            media_type, charset = _content_type(fields)
            body = bytearray()
            async for chunk in response.aiter_stream():
                body += chunk
                if len(body) >= self._most_bytes:
                    break
        packed, encoding = bytes(body[: self._most_bytes]), fields.get("Content-Encoding", "")
        try:
            return Page(decompress(packed, encoding, self._most_bytes), media_type, charset)
        except ValueError as error:
            raise PageError(str(error)) from error


class _Backend(httpcore.AnyIOBackend):
    """Connections of httpcore to addresses that the policy has checked; TLS is to the name."""

    def __init__(self, policy: AddressPolicy, lookups: ThreadPoolExecutor) -> None:
        self._policy, self._lookups = policy, lookups
        self._opened: list[httpcore.AsyncNetworkStream] = []

    async def aclose(self) -> None:
        """Close what is still open: httpcore forgets a connection that is given up in the middle of
        its TLS handshake."""
        for stream in self._opened:
            await stream.aclose()

    async def connect_tcp(self, host: str, port: int, *more: Any, **kind: Any) -> Any:
        """A connection to the first address that answers; raises AddressRefused."""
        loop = asyncio.get_running_loop()
        failure: Exception | None = None
        for address in await loop.run_in_executor(self._lookups, self._policy.resolve, host, port):
            try:
                self._opened.append(await super().connect_tcp(address, port, *more, **kind))
                return self._opened[-1]
            except httpcore.ConnectError as error:
                failure = error
        raise failure or AddressRefused(f"{host!r} has no address")


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
