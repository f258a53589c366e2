"""What all clients of ours share that try again: growing pauses, and reading `Retry-After`."""

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

_random = random.SystemRandom()  # seeding `random`, as training does, must not align the pauses


class Transient(Exception):
    """One attempt failed in a way that another may not; `retry_after` s were asked for."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Pauses:
    """Seconds between attempts."""

    first: float = 0.25
    """Before the second attempt; each further pause is twice as long."""
    longest: float = 8.0
    longest_asked: float = 30.0
    """The longest pause that a `Retry-After` may ask for."""

    def after(self, num_pauses: int, retry_after: float = 0.0) -> float:
        """The next pause, cut by up to a half at random; never shorter than what was asked for."""
        longest = min(self.longest, self.first * 2.0 ** min(num_pauses, 60))
        asked = min(self.longest_asked, retry_after)
        return max(longest * _random.uniform(0.5, 1.0), asked * _random.uniform(1.0, 1.1))


def try_again(
    attempt: Callable[[], T],
    num_retries: int,
    pauses: Pauses,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What `attempt` returns, made again after a Transient; the last one is raised."""
    for num_pauses in range(num_retries):
        try:
            return attempt()
        except Transient as error:
            pause = pauses.after(num_pauses, error.retry_after)
            logger.info("%s; try %d in %.1f s", error, num_pauses + 2, pause)
            sleep(pause)
    return attempt()


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds of the header `Retry-After`, a number or an HTTP date; 0 where there is none."""
    text = headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return float(text)
    until, now = _date(text), _date(headers.get("Date", "")) or datetime.now(UTC)
    return 0.0 if until is None else max(0.0, (until - now).total_seconds())


def _date(text: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)
