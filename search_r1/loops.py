"""Coroutines called from plain code, also in a notebook, whose thread runs a loop already."""

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own, while the context is open."""

    def __enter__(self) -> Self:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="search-r1-loop", daemon=True)
        self._thread.start()
        self._ready.wait()
        return self

    def _serve(self) -> None:
        # Processes that an engine starts here must not end by the ctrl-c that stops a question.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._ready.set()
            self._loop.run_forever()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What the coroutine gives; an interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def run(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, in another thread where a loop is running in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with LoopThread() as thread:
        return thread.run(work)
