"""The event loop in a thread, from which synchronous code runs coroutines."""

import asyncio
import errno
import threading

import pytest

from search_r1.loops import LoopThread


@pytest.mark.timeout(10)
def test_a_loop_that_cannot_be_created_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of file descriptors, for example, is raised; the caller does not wait for ever."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio.events, "new_event_loop", refuse)
    monkeypatch.setattr(asyncio, "new_event_loop", refuse)
    with pytest.raises(OSError, match="Too many open files"), LoopThread():
        pass


def test_a_loop_runs_coroutines_beside_the_caller_and_ends() -> None:
    """The caller may have its own event loop; tasks that still run at the end are cancelled."""
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def start() -> int:
        asyncio.get_running_loop().call_soon(lambda: waiting.append(asyncio.ensure_future(wait())))
        await asyncio.sleep(0.01)
        return threading.get_ident()

    async def main() -> int:
        with LoopThread() as thread:
            return thread.run(start())

    waiting: list[asyncio.Task[None]] = []
    assert asyncio.run(main()) != threading.get_ident()
    assert cancelled.is_set()
