"""Growing pauses, `Retry-After`, and trying again."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_r1.retrying import Pauses, Transient, retry_after, try_again

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("7", 7),
        (" 2.5 ", 2.5),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90),
        (format_datetime(NOW - timedelta(seconds=90), usegmt=True), 0),
        ("Sunday, 01-Mar-26 12:01:00 GMT", 60),
        ("Sun Mar  1 12:01:00 2026", 60),
        ("-3", 0),
        ("soon", 0),
        ("nan", 0),
        ("9" * 400, 0),
        ("٣", 0),
    ],
)
def test_retry_after_is_read(text: str, expected: float) -> None:
    """Seconds, and all three HTTP dates relative to the server's own clock; nonsense is 0."""
    date = format_datetime(NOW, usegmt=True)
    assert retry_after({"Retry-After": text, "Date": date}) == expected


@given(st.text(max_size=60), st.text(max_size=60))
@settings(max_examples=200)
def test_any_header_is_survived(text: str, date: str) -> None:
    """No header of a server raises; what comes out is never negative."""
    assert retry_after({"Retry-After": text, "Date": date}) >= 0


def test_pauses_grow_within_their_bounds() -> None:
    """Exponential, halved at most by jitter, bounded; what a server asks for is kept, bounded."""
    pauses = Pauses(0.25, 8.0, 30.0)
    for n in range(200):
        longest = min(8.0, 0.25 * 2.0**n)
        assert longest / 2 <= pauses.after(n, 0.0) <= longest
        assert 20 <= pauses.after(n, 20.0) <= 22
        assert 30 <= pauses.after(n, 1e9) <= 33
    assert len({pauses.after(3, 0.0) for _ in range(20)}) > 1


def test_what_may_pass_is_tried_again_within_bounds() -> None:
    """Only a Transient is; the pauses are those asked for, and the last error is raised."""
    outcomes: list[Exception | int] = [Transient("busy", 20.0), Transient("busy"), 7]
    slept: list[float] = []

    def attempt() -> int:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert try_again(attempt, 2, Pauses(), slept.append) == 7
    assert 20 <= slept[0] <= 22 and slept[1] <= 0.5
    outcomes[:] = [Transient("a"), Transient("b")]
    with pytest.raises(Transient, match="b"):
        try_again(attempt, 1, Pauses(), slept.append)
    outcomes[:] = [ValueError("final"), 7]
    with pytest.raises(ValueError, match="final"):
        try_again(attempt, 9, Pauses(), slept.append)
