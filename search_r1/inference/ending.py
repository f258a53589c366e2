"""Leaves no engine and no temporary model behind, however a command ends."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from verl.plugins import optional

SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # of `kill`, batch systems, closed terminals


@contextlib.contextmanager
def exits_at_signals() -> Iterator[None]:
    """Let the first of `SIGNALS` raise SystemExit in the body, with status 128 + number.

    So engines and temporary models are closed. Ignored signals stay ignored; outside of the main
    thread, where Python cannot set handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with contextlib.ExitStack() as restored:

        def leave(number: int, frame: FrameType | None) -> NoReturn:
            restored.close()
            raise SystemExit(128 + number)

        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                restored.callback(signal.signal, number, signal.signal(number, leave))
        yield


@contextlib.contextmanager
def ending_processes() -> Iterator[contextlib.ExitStack]:
    """Kill what the body starts before it closes the stack, when the body or this process ends.

    Even at SIGKILL: an engine's processes would outlive this one.
    """
    reaper = optional("verl.ext.reaper")
    with contextlib.ExitStack() as ended, contextlib.ExitStack() as starting:
        if reaper is not None:
            starting.callback(ended.enter_context(reaper.OrphanReaper()).unmark)
        yield starting
