"""Log lines of progress."""

import pytest

from search_r1.retrieval.index import progress


def test_lines_have_rate_and_time_left(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal, lines are logged after 30 s and at the end."""
    caplog.set_level("INFO")
    with progress.progress("encode", "documents", 1000, 500) as report:
        report(600)
    assert [line.partition(" (")[0] for line in caplog.messages] == [
        "encode: 500 of 1000 documents",
        "encode: 600 of 1000 documents",
    ]
    caplog.clear()
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    with progress.progress("encode", "documents", 1000, 500) as report:
        report(600)
    assert " documents/s, " in caplog.messages[1] and caplog.messages[1].endswith(" left")
