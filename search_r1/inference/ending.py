"""Ends a command that has an engine and temporary models in an orderly way, however it is ended."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from verl.plugins import optional

SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Sent by `kill`, batch systems and containers, and by a terminal that closes."""


@contextlib.contextmanager
def exits_at_signals() -> Iterator[None]:
    """Let `SIGNALS` raise SystemExit in the body, with status 128 + number.

    By default they would end Python at once, and leave the engine's processes and temporary models
    behind. Only the first one is caught. Ignored signals stay ignored; outside of the main thread,
    where Python cannot set handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: h for n in SIGNALS if (h := signal.getsignal(n)) != signal.SIG_IGN}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        restore()
        raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        restore()


@contextlib.contextmanager
def ending_processes() -> Iterator[contextlib.ExitStack]:
    """Kill, when this process ends, what is started in the body until the stack is closed.

    Whatever ends this process: the processes of an engine would outlive SIGKILL, with their memory.
    Those that are still there at the end of the body are killed too.
    """
    with contextlib.ExitStack() as starting:
        reaper = optional("verl.ext.reaper")
        if reaper is None:
            yield starting
            return
        with reaper.OrphanReaper() as marked:
            starting.callback(marked.unmark)
            yield starting
