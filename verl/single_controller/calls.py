"""The calls that an actor's hosted object has finished; kept in the actor's process until taken."""

import time
from collections import deque
from typing import NamedTuple

MAX_KEPT = 1000
"""Number of calls that are kept, the latest ones."""


class Call(NamedTuple):
    """A finished call of a hosted object; times are seconds since the epoch by its clock."""

    method: str
    begin: float
    end: float


FINISHED: deque[Call] = deque(maxlen=MAX_KEPT)


def note(method: str, begin: float) -> None:
    """Note that a call which began at `begin` has finished now."""
    FINISHED.append(Call(method, begin, time.time()))


def take() -> list[Call]:
    """Return the calls finished since the last time, at most `MAX_KEPT`."""
    calls = list(FINISHED)
    FINISHED.clear()
    return calls
