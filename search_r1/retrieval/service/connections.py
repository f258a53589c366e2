"""Limits on connections: their number, the size of requests, and the time of slow clients.

uvicorn's protocol has none of these limits, and uvloop silently drops connections when the process
runs out of file descriptors.
"""

import asyncio
import logging
import resource
import time

import psutil
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 2**10
"""Largest request line with headers."""
MAX_HEADERS = 100
HEAD_S = 30.0
"""Seconds for the complete headers of a request, after the connection or the first byte."""
SEND_S = 120.0
"""Total seconds that a response may wait for its client to read."""
KEEP_ALIVE_S = 75
MAX_DESCRIPTORS = 65_536
"""File descriptors to ask for if the hard limit is higher."""
SPARE_DESCRIPTORS = 64
"""File descriptors kept for files, and for connections that are refused with 503."""
BYTES_PER_BODY_BYTE = 8
"""Bytes sent per byte of the body, if each one is a chunk of its own (chunked encoding)."""
LOG_INTERVAL_S = 60.0
FULL_RESPONSE = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
FULL_MESSAGE = (
    "%d connections are open, the limit of file descriptors: others get 503; raise ulimit -n"
)


def configure(app: ASGIApp, max_body_bytes: int, drain: float) -> uvicorn.Config:
    """Return uvicorn's settings for `app`; at shutdown accepted requests have `drain` seconds."""
    max_bytes = MAX_HEAD_BYTES + BYTES_PER_BODY_BYTE * max_body_bytes
    limits = {"max_connections": max_connections(), "max_bytes": max_bytes}
    return uvicorn.Config(
        app,
        http=type("Protocol", (LimitedProtocol,), limits),
        ws="none",
        log_level="warning",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(drain) + 2,
    )


def max_connections() -> int:
    """Raise the limit of file descriptors, and return the number of connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = min(hard, MAX_DESCRIPTORS) if hard != resource.RLIM_INFINITY else MAX_DESCRIPTORS
    if 0 <= soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(1, max(soft, limit) - psutil.Process().num_fds() - SPARE_DESCRIPTORS)


class LimitedProtocol(HttpToolsProtocol):
    """A connection with limits on its number, its requests' size, and slow clients."""

    max_connections: int
    max_bytes: int
    """Largest number of bytes that a client may send for one request."""
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _wait_left_s = 0.0
    """Seconds that this response may still wait for its client."""
    _wait_start = 0.0
    """Start of the current wait (event loop time)."""
    _is_in_head = True
    """Whether no request has begun, or its headers are incomplete."""
    _num_bytes = 0
    """Bytes received for the current request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_left_s = SEND_S
        if len(self.connections) > self.max_connections:
            logger.warning(FULL_MESSAGE, self.max_connections)
            transport.write(FULL_RESPONSE)
            transport.close()
        else:
            self._head_timer = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_head_timer()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_start = self.loop.time()
        self._send_timer = self.loop.call_later(self._wait_left_s, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wait_left_s -= self.loop.time() - self._wait_start
        if self._send_timer is not None:
            self._send_timer.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_left_s = SEND_S

    def _abort(self) -> None:
        logger.warning("a client did not read its response within %g s: disconnected", SEND_S)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; a request that is too large ends the connection."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self._is_in_head:
            is_too_large = self._num_bytes > MAX_HEAD_BYTES
        else:  # trailers after the body are added to the headers
            is_too_large = self._num_bytes > self.max_bytes or len(self.headers) > MAX_HEADERS
        if is_too_large:
            self.send_400_response("The request is too large.")
        if not self._is_in_head and not self.cycle.response_complete:
            self._stop_head_timer()  # now the application limits the time
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_bytes = True, 0

    def on_headers_complete(self) -> None:
        if len(self.headers) > MAX_HEADERS:
            raise ValueError("too many headers")  # uvicorn answers 400
        super().on_headers_complete()
        self._is_in_head = False

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class RateLimitFilter(logging.Filter):
    """Passes equal warnings once in LOG_INTERVAL_S: clients could fill a disk with them."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        is_due = now - self._logged_at.get(record.msg, -LOG_INTERVAL_S) >= LOG_INTERVAL_S
        if is_due:
            self._logged_at[record.msg] = now
        return is_due or record.levelno > logging.WARNING


for noisy in (logger, logging.getLogger("uvicorn.error")):
    noisy.addFilter(RateLimitFilter())
