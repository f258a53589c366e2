"""Progress lines: when they come and what they say."""

import logging

import pytest

from search_r1.search.index.progress import LogLines, duration


def test_lines_tell_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    """A line comes when it is due or all is done; the rate leaves out what was there before."""
    caplog.set_level(logging.INFO)
    times = iter([0.0, 5.0, 10.0, 12.0])
    report = LogLines("encode", "documents", 1000, 500, interval=10, clock=lambda: next(times))
    for done in (550, 600, 1000):
        report(done)
    assert caplog.messages == [
        "encode: 600 of 1000 documents (60.0 %), 10.0 a second, 0:00:40 left",
        "encode: 1000 of 1000 documents (100.0 %), 41.7 a second, 0:00:00 left",
    ]


def test_durations_are_read_as_clocks() -> None:
    """Hours, minutes and seconds."""
    assert (duration(3723.4), duration(59.6)) == ("1:02:03", "0:01:00")
