"""Retries shared by all HTTP clients: exponential backoff, and parsing of `Retry-After`."""

import logging
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Training seeds `random` alike in all processes; their retries must not happen at the same time.
_random = random.SystemRandom()


class TransientError(Exception):
    """A failed attempt that is worth repeating, after `retry_after` s if the server asks for it."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Backoff:
    """Exponential backoff with random jitter; all values in seconds."""

    initial: float = 0.25
    """Delay before the second attempt; doubles with each further attempt."""
    maximum: float = 8.0
    max_retry_after: float = 30.0
    """Upper bound for a delay that a `Retry-After` header asks for."""

    def delay(self, num_delays: int, retry_after: float = 0.0) -> float:
        """Return the next delay after `num_delays` earlier ones.

        It is shortened by up to a half at random, but never below `retry_after` (within its bound).
        """
        backoff = min(self.maximum, self.initial * 2.0 ** min(num_delays, 60))
        requested = min(self.max_retry_after, retry_after)
        return max(backoff * _random.uniform(0.5, 1.0), requested * _random.uniform(1.0, 1.1))


def call_with_retries(
    attempt: Callable[[], T],
    num_retries: int,
    backoff: Backoff,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return the result of `attempt`, repeated up to `num_retries` times after a TransientError."""
    for num_delays in range(num_retries):
        try:
            return attempt()
        except TransientError as error:
            delay = backoff.delay(num_delays, error.retry_after)
            logger.info("%s; attempt %d in %.1f s", error, num_delays + 2, delay)
            sleep(delay)
    return attempt()


def parse_retry_after(headers: Mapping[str, str]) -> float:
    """Return the seconds of the `Retry-After` header, a number or an HTTP date; 0 without one."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return float(text)
    until = _parse_date(text)
    if until is None:
        return 0.0
    now = _parse_date(headers.get("Date", "")) or datetime.now(UTC)
    return max(0.0, (until - now).total_seconds())


def _parse_date(text: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)
