"""Limits of a service: requests sent in a second, and bytes that a body may unpack to."""

import threading
import time
import zlib
from collections.abc import Callable


class RateLimit:
    """A token bucket that holds one token, shared by threads: requests are evenly spaced."""

    def __init__(
        self,
        per_second: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval = 1 / per_second
        self._now = now
        self._sleep = sleep
        self._next = now()
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when a request may be sent; only one caller returns per interval."""
        while True:
            with self._lock:
                pause = self._next - self._now()
                if pause <= 0:
                    self._next = self._now() + self._interval
                    return
            self._sleep(pause)

    def hold(self, seconds: float) -> None:
        """Let nobody send for `seconds`, also those who wait already."""
        with self._lock:
            self._next = max(self._next, self._now() + seconds)


def decompress(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """A body in the `Content-Encoding` that it came in, never more than `most_bytes` of it.

    Raises ValueError for another encoding than gzip, and for what is broken.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in ("gzip", "x-gzip"):
        raise ValueError(f"encoding {encoding!r}, which was not asked for")
    try:
        return zlib.decompressobj(wbits=31).decompress(body, most_bytes)
    except zlib.error as error:
        raise ValueError(f"broken gzip: {error}") from error
