"""Log lines of progress."""

import pytest

from search_r1.retrieval.index.progress import log_lines


def test_lines_have_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    """A line is logged after 30 s and at the end; the rate ignores units done before the start."""
    caplog.set_level("INFO")
    times = iter([0.0, 15.0, 30.0, 36.0])
    report = log_lines("encode", "documents", 1000, 500, lambda: next(times))
    for done in (550, 600, 1000):
        report(done)
    assert caplog.messages == [
        "encode: 600 of 1000 documents (60.0 %), 3.3 a second, 02:00 left",
        "encode: 1000 of 1000 documents (100.0 %), 13.9 a second, 00:00 left",
    ]
