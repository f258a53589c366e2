"""HTTP exchanges of several threads, each within one deadline and a size, whatever is answered.

A client of threads could bound each read alone, and a head that drips is read for hours. Redirects
are not followed: they would carry a key to another machine.
"""

import asyncio
import contextlib
import zlib
from dataclasses import dataclass
from typing import Any

import httpx

from search_r1.loops import LoopThread


@dataclass(frozen=True)
class Answer:
    """A whole answer, unpacked."""

    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


class Exchanges:
    """Keeps connections, on an event loop in a thread of its own; safe to use from all others."""

    def __init__(self, seconds: float, most_bytes: int, **settings: Any) -> None:
        """`seconds` and `most_bytes` of an answer; `settings` are httpx's."""
        self._seconds, self._most_bytes = seconds, most_bytes
        self._client = httpx.AsyncClient(timeout=seconds, **settings)
        self._open = contextlib.ExitStack()
        self._loop = self._open.enter_context(LoopThread())
        self._open.callback(lambda: self._loop.run(self._client.aclose()))

    def send(self, method: str, url: str, **fields: Any) -> Answer:
        """The answer. Raises httpx.HTTPError without one, ValueError for one that is no use."""
        answer, most = self._loop.run(self._send(method, url, fields)), self._most_bytes
        encoding = answer.headers.get("Content-Encoding", "")
        body = decompress(answer.body, encoding, most + 1)
        if max(len(answer.body), len(body)) > most:
            raise ValueError(f"more than {most} bytes")
        return Answer(answer.status, answer.headers, body)

    def close(self) -> None:
        """Close the connections; a second time does nothing."""
        self._open.close()

    async def _send(self, method: str, url: str, fields: dict[str, Any]) -> Answer:
        """The answer as it came, or the beginning of one that is too long."""
        fields["headers"] = {"Accept-Encoding": "gzip", **fields.get("headers", {})}
        body = bytearray()
        try:
            async with (
                asyncio.timeout(self._seconds),
                self._client.stream(method, url, **fields) as response,
            ):
                async for chunk in response.aiter_raw():  # httpx would unpack to any size
                    body += chunk
                    if len(body) > self._most_bytes:
                        break
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no complete answer within {self._seconds:g} s") from error
        return Answer(response.status_code, response.headers, bytes(body))


def decompress(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """At most `most_bytes` of a body in its `Content-Encoding`. Raises ValueError, but for gzip."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in ("gzip", "x-gzip"):
        raise ValueError(f"encoding {encoding!r}, which was not asked for")
    try:
        return zlib.decompressobj(wbits=31).decompress(body, most_bytes)
    except zlib.error as error:
        raise ValueError(f"broken gzip: {error}") from error
