"""Exponential backoff, parsing of `Retry-After`, and retried calls."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_r1.retrying import Backoff, TransientError, call_with_retries, parse_retry_after

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
    """Seconds and all three HTTP date formats, relative to the server's clock; nonsense is 0."""
    date = format_datetime(NOW, usegmt=True)
    assert parse_retry_after({"Retry-After": text, "Date": date}) == expected


@given(st.text(max_size=60), st.text(max_size=60))
@settings(max_examples=200)
def test_no_header_raises_an_error(text: str, date: str) -> None:
    """No header value raises an error or gives a negative delay."""
    assert parse_retry_after({"Retry-After": text, "Date": date}) >= 0


def test_delays_grow_within_their_bounds() -> None:
    """Delays grow exponentially; jitter at most halves them; `Retry-After` is bounded."""
    backoff = Backoff(0.25, 8.0, 30.0)
    for n in range(200):
        longest = min(8.0, 0.25 * 2.0**n)
        assert longest / 2 <= backoff.delay(n, 0.0) <= longest
        assert 20 <= backoff.delay(n, 20.0) <= 22
        assert 30 <= backoff.delay(n, 1e9) <= 33
    assert len({backoff.delay(3, 0.0) for _ in range(20)}) > 1


def test_transient_errors_are_retried_within_bounds() -> None:
    """Only a TransientError is retried, after the requested delay; the last error is raised."""
    outcomes: list[Exception | int] = [TransientError("busy", 20.0), TransientError("busy"), 7]
    slept: list[float] = []

    def attempt() -> int:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert call_with_retries(attempt, 2, Backoff(), slept.append) == 7
    assert 20 <= slept[0] <= 22 and slept[1] <= 0.5
    outcomes[:] = [TransientError("a"), TransientError("b")]
    with pytest.raises(TransientError, match="b"):
        call_with_retries(attempt, 1, Backoff(), slept.append)
    outcomes[:] = [ValueError("final"), 7]
    with pytest.raises(ValueError, match="final"):
        call_with_retries(attempt, 9, Backoff(), slept.append)
