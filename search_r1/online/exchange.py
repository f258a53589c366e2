"""A thread-safe HTTP client that bounds the total time and the size of every exchange.

A synchronous client can only bound each read, so a server that sends its headers byte by byte could
occupy it for hours. Redirects are not followed, since they would send a key to another host.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from search_r1.loops import LoopThread
from verl.proxies import client_settings


@dataclass(frozen=True)
class Response:
    """A complete, decompressed response."""

    status: int
    headers: httpx.Headers
    body: bytes


class BoundedHttpClient:
    """HTTP client with pooled connections, usable from any thread; runs its own event loop."""

    def __init__(self, timeout: float, max_bytes: int, url: str = "", **settings: Any) -> None:
        """`timeout` (s) bounds a whole exchange, `max_bytes` a response; `settings` are httpx's.

        `url` is the only server that it talks to, if there is one; without a proxy if it is local.
        """
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._client = httpx.AsyncClient(timeout=timeout, **client_settings(url), **settings)
        self._open = contextlib.ExitStack()
        self._loop = self._open.enter_context(LoopThread())
        self._open.callback(lambda: self._loop.run(self._client.aclose()))

    def send(self, method: str, url: str, **fields: Any) -> Response:
        """Send a request and return the response.

        Raises httpx.HTTPError without a response, ValueError if it is too large or undecodable.
        """
        return self._loop.run(self._send(method, url, fields))

    def close(self) -> None:
        """Close the connections and stop the event loop; may be called twice."""
        self._open.close()

    async def _send(self, method: str, url: str, fields: dict[str, Any]) -> Response:
        """Return the response; reading stops once it is too large."""
        fields["headers"] = {"Accept-Encoding": "gzip", **fields.get("headers", {})}
        body = bytearray()
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._client.stream(method, url, **fields) as response,
            ):
                async for chunk in decoded(response):
                    body += chunk
                    if len(body) > self._max_bytes:
                        raise ValueError(f"more than {self._max_bytes} bytes")
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no complete answer within {self._timeout:g} s") from error
        except httpx.DecodingError as error:
            raise ValueError(f"broken gzip: {error}") from error
        return Response(response.status_code, response.headers, bytes(body))


def decoded(response: httpx.Response) -> AsyncIterator[bytes]:
    """Return the chunks of a body, without gzip; raises ValueError for any other encoding.

    Several encodings on top of each other could unpack a few bytes to any size.
    """
    if (encoding := response.headers.get("Content-Encoding", "gzip")) not in ("gzip", "identity"):
        raise ValueError(f"encoding {encoding!r}, which was not asked for")
    return response.aiter_bytes()
