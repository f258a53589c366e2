"""Pauses and `Retry-After`, without a server."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_r1.search.transport import Patience, excerpt, retry_after

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
    headers = [(b"Retry-After", text.encode()), (b"Date", date.encode())]
    assert retry_after(httpx.Response(503, headers=headers)) == expected


@given(st.binary(max_size=60), st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_header_is_survived(text: bytes, date: bytes) -> None:
    """No header of a server raises; what comes out is never negative."""
    headers = [(b"Retry-After", text), (b"Date", date)]
    assert retry_after(httpx.Response(429, headers=headers)) >= 0


def test_pauses_grow_within_their_bounds() -> None:
    """Exponential, halved at most by jitter, bounded; what a server asks for is kept, bounded."""
    patience = Patience(backoff=0.25, max_backoff=8.0, max_retry_after=30.0)
    for n in range(200):
        longest = min(8.0, 0.25 * 2.0**n)
        assert longest / 2 <= patience.pause(n, 0.0) <= longest
        assert 20 <= patience.pause(n, 20.0) <= 22
        assert 30 <= patience.pause(n, 1e9) <= 33
    assert len({patience.pause(3, 0.0) for _ in range(20)}) > 1


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"timeout": float("nan")}, {"max_retries": -1}])
def test_settings_that_could_never_answer_are_refused(wrong: dict[str, float]) -> None:
    """The message names the setting and what was expected."""
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} .*expected"):
        Patience(**wrong)  # type: ignore[arg-type]


def test_excerpts_of_any_charset() -> None:
    """A body that lies about its charset still has an excerpt."""
    headers = {"Content-Type": "text/plain; charset=base64"}
    assert excerpt(httpx.Response(500, content=b"ab\xff", headers=headers), 3) == "ab\ufffd"
