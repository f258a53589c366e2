"""What a command says while it starts, on a terminal and in a log."""

import contextlib
import logging
import os
import pty
import sys
from pathlib import Path

import pytest

from search_r1.phases import phase


def test_a_log_has_one_line_for_each_phase_when_it_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The line is there before the work, and at INFO also in a command that logs warnings only."""
    assert logging.getLogger().getEffectiveLevel() == logging.WARNING
    with phase("reading the model"):
        (record,) = caplog.records
    assert record.levelno == logging.INFO and record.getMessage().startswith("reading the model (")
    assert len(caplog.records) == 1


def test_a_terminal_shows_the_phase_and_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The finished phase stays, with a tick and its duration."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with phase("starting the engine"):
            pass
    parts = []
    with contextlib.suppress(OSError):  # the other side is closed
        while part := os.read(ours, 10_000):
            parts.append(part)
    os.close(ours)
    shown = b"".join(parts).decode()
    assert "starting the engine" in shown and "✓" in shown and "0:00:00" in shown
