"""A page of a stranger, fetched with limits: addresses, time, size, redirects and types."""

import logging
import time
import zlib
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx

from search_r1.online.addresses import (
    AddressPolicy,
    AddressRefused,
    CheckedBackend,
)

logger = logging.getLogger(__name__)

MOST_REDIRECTS = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})
TYPES = ("text/html", "text/plain")
HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; search-r1)",
    "Accept": "text/html, text/plain;q=0.9",
    "Accept-Encoding": "identity",
}
FAILURES = (
    httpcore.TimeoutException,
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
)


class PageError(Exception):
    """A page that cannot be had, or that is not text."""


@dataclass(frozen=True)
class Page:
    """What a page's server sent: at most the first bytes, its type and declared charset."""

    body: bytes
    media_type: str
    charset: str | None


class PageFetcher:
    """Fetches pages without proxies and cookies; safe to use from several threads."""

    def __init__(self, policy: AddressPolicy, most_bytes: int, timeout: float) -> None:
        """`most_bytes` of a page are read, in `timeout` s with all of its redirects."""
        self._most_bytes = most_bytes
        self._timeout = timeout
        self._pool = httpcore.ConnectionPool(
            max_keepalive_connections=0, network_backend=CheckedBackend(policy)
        )

    def fetch(self, url: str) -> Page:
        """The page at `url` or where it redirects to; raises PageError."""
        end = time.monotonic() + self._timeout
        for _ in range(MOST_REDIRECTS + 1):
            try:
                answer = self._get(_parse(url), end)
            except (*FAILURES, AddressRefused, OSError) as error:
                raise PageError(f"{type(error).__name__}: {error}") from error
            if isinstance(answer, Page):
                return answer
            url = answer
        raise PageError(f"more than {MOST_REDIRECTS} redirects")

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def _get(self, url: httpx.URL, end: float) -> Page | str:
        """The page, or the address that it redirects to."""
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        left = max(0.001, end - time.monotonic())
        limits = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), left)}
        headers = [*HEADERS.items(), ("Host", url.netloc.decode())]
        with self._pool.stream("GET", target, headers=headers, extensions=limits) as response:
            fields = httpx.Headers(response.headers)
            if response.status in REDIRECTS and "Location" in fields:
                return str(_join(url, fields["Location"]))
            if response.status != 200:
                raise PageError(f"status {response.status}")
            media_type, charset = _content_type(fields)
            body = _decompress(self._read(response, end), fields, self._most_bytes)
            return Page(body, media_type, charset)

    def _read(self, response: httpcore.Response, end: float) -> bytes:
        """The first bytes of the body; raises PageError where they take too long."""
        body = bytearray()
        for chunk in response.iter_stream():
            body += chunk
            if len(body) >= self._most_bytes:
                break
            if time.monotonic() > end:
                raise PageError(f"not complete within {self._timeout:g} s")
        return bytes(body[: self._most_bytes])


def _parse(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise PageError(f"no address: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise PageError(f"scheme {parsed.scheme!r}; pages are fetched by http and https")
    return parsed


def _join(url: httpx.URL, location: str) -> httpx.URL:
    try:
        return url.join(location)
    except httpx.InvalidURL as error:
        raise PageError(f"redirect to no address: {error}") from error


def _content_type(fields: httpx.Headers) -> tuple[str, str | None]:
    """Media type and charset; raises PageError for what is not text."""
    media_type, *parameters = (part.strip() for part in fields.get("Content-Type", "").split(";"))
    if media_type.lower() not in TYPES:
        raise PageError(f"type {media_type!r}; pages are {' or '.join(TYPES)}")
    pairs: dict[str, Any] = {p.partition("=")[0].lower(): p.partition("=")[2] for p in parameters}
    return media_type.lower(), pairs.get("charset", "").strip("\"'") or None


def _decompress(body: bytes, fields: httpx.Headers, most_bytes: int) -> bytes:
    """The body of a server that compresses unasked, never more than `most_bytes` of it."""
    encoding = fields.get("Content-Encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "x-gzip"):
        raise PageError(f"encoding {encoding!r}, which was not asked for")
    try:
        return zlib.decompressobj(wbits=31).decompress(body, most_bytes)
    except zlib.error as error:
        raise PageError(f"broken gzip: {error}") from error
