"""Fetches untrusted pages within limits of address, time, size, redirects and content type."""

import asyncio
import contextlib
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx

from search_r1.loops import LoopThread
from search_r1.online.addresses import AddressPolicy, AddressRefused
from search_r1.online.exchange import decoded

MAX_REDIRECTS = 5
NUM_LOOKUPS = 16
"""Threads that resolve host names, since the system's resolver has no timeout."""
TYPES = ("text/html", "text/plain")
HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; search-r1)",
    "Accept": "text/html, text/plain;q=0.9",
    "Accept-Encoding": "identity",
}
FAILURES = (httpx.HTTPError, httpx.InvalidURL, AddressRefused, OSError, ValueError)


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
    """Fetches pages without proxies; safe to use from several threads.

    Cookies last for the redirects of one page.

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
        except (httpx.TimeoutException, TimeoutError) as error:
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
            httpx.AsyncClient(
                transport=_Transport(self._tls, backend),
                headers=HEADERS,
                timeout=None,
                trust_env=False,
            ) as client,
        ):
            request = client.build_request("GET", url)
            for _ in range(MAX_REDIRECTS + 1):
                # httpx would read the whole body of a redirect that it follows itself.
                response = await client.send(request, stream=True, auth=lambda request: request)
                async with contextlib.aclosing(response):
                    if response.next_request is None:
                        return await self._read(response)
                    request = response.next_request
        raise PageError(f"more than {MAX_REDIRECTS} redirects")

    async def _read(self, response: httpx.Response) -> Page:
        if response.status_code != 200:
            raise PageError(f"status {response.status_code}")
        media_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
        if media_type.lower() not in TYPES:
            raise PageError(f"type {media_type!r}; pages must be {' or '.join(TYPES)}")
        body = bytearray()
        async for chunk in decoded(response):
            body += chunk
            if len(body) >= self._max_bytes:
                break
        content = bytes(body[: self._max_bytes])
        return Page(content, media_type.lower(), response.charset_encoding)


class _Transport(httpx.AsyncHTTPTransport):
    """httpx's own transport, with connections that `backend` makes."""

    def __init__(self, tls: ssl.SSLContext, backend: httpcore.AsyncNetworkBackend) -> None:
        self._pool = httpcore.AsyncConnectionPool(tls, network_backend=backend)


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
