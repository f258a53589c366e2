"""What a client may do before its request is known: so many connections, so large a head, so long.

uvicorn's protocol bounds neither, and uvloop drops connections without a word once descriptors run
out.
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
MAX_HEADERS = 100
HEAD_S = 30.0
"""A request's head must arrive in so many seconds after the connection, or after its first byte."""
SEND_S = 120.0
"""So long in all, over its pauses, an answer waits for its client to take it."""
KEEP_ALIVE_S = 75
ENOUGH = 65_536
SPARE_DESCRIPTORS = 64
"""Of these, for files and for the connections that are told that there is no room."""
PER_BYTE = 8
"""Bytes that a byte of a body may take on its way, in chunks of its own."""
QUIET_S = 60.0
"""Between two lines about clients that were turned away."""
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
FULL_TEXT = "%d connections are open, all that descriptors allow: others get 503; raise ulimit -n"


def configure(app: ASGIApp, max_body_bytes: int, drain: float) -> uvicorn.Config:
    """uvicorn's settings for `app`; at its end accepted requests have `drain` seconds more."""
    limits = {"most": num_connections(), "max_bytes": MAX_HEAD_BYTES + PER_BYTE * max_body_bytes}
    return uvicorn.Config(
        app,
        http=type("Protocol", (Bounded,), limits),
        ws="none",
        log_level="warning",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(drain) + 2,
    )


def num_connections() -> int:
    """How many this process can hold, its limit of descriptors raised as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, ENOUGH) if hard != resource.RLIM_INFINITY else ENOUGH
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(1, max(soft, most) - psutil.Process().num_fds() - SPARE_DESCRIPTORS)


class Bounded(HttpToolsProtocol):
    """A connection, one of `most` at once, with `max_bytes` for a request as it is sent."""

    most: int
    max_bytes: int
    _timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _wait_left = _waits_since = 0.0
    """Seconds that this answer may still wait, and when its last wait began."""
    _is_in_head = True
    """No request has begun, or its headers are not all here."""
    _num_bytes = 0
    """What this request's client has sent so far."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_left = SEND_S
        if len(self.connections) > self.most:
            logger.warning(FULL_TEXT, self.most)
            transport.write(FULL)
            transport.close()
        else:
            self._timer = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()
        if self._send_timer is not None:
            self._send_timer.cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._waits_since = self.loop.time()
        self._send_timer = self.loop.call_later(self._wait_left, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wait_left -= self.loop.time() - self._waits_since
        if self._send_timer is not None:
            self._send_timer.cancel()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_left = SEND_S

    def _give_up(self) -> None:
        logger.warning("a client did not take its answer within %g s: it is left", SEND_S)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; what is too much ends the connection."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self._is_in_head:
            is_too_much = self._num_bytes > MAX_HEAD_BYTES
        else:  # trailers of a body are headers, too
            is_too_much = self._num_bytes > self.max_bytes or len(self.headers) > MAX_HEADERS
        if is_too_much:
            self.send_400_response("The request is too large.")
        if not self._is_in_head and not self.cycle.response_complete:
            self._stop_timer()  # a request is under way: the application bounds its time
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self.timeout_keep_alive_handler)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_bytes = True, 0

    def on_headers_complete(self) -> None:
        if len(self.headers) > MAX_HEADERS:
            raise ValueError("too many headers")  # uvicorn answers 400
        super().on_headers_complete()
        self._is_in_head = False

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Seldom(logging.Filter):
    """Lets a warning through once in a while: clients could fill a disk with the same line."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` is worse than a warning, or its wording was not seen for QUIET_S."""
        now = time.monotonic()
        if (
            record.levelno > logging.WARNING
            or now - self._told.get(record.msg, -QUIET_S) >= QUIET_S
        ):
            self._told[record.msg] = now
            return True
        return False


for noisy in (logger, logging.getLogger("uvicorn.error")):
    noisy.addFilter(Seldom())
