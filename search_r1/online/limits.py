"""How often a service is asked, and how long one waits after it refused."""

import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


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


def pause(attempt: int) -> float:
    """Seconds before try `attempt` (from 1) is made: doubling, half of it by chance."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempt - 1, 60))
    return float(longest * random.uniform(0.5, 1.0))


def read_retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, given in seconds or as a date; None if it says nothing."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())
