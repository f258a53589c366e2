"""Run coroutines from synchronous code, even in a notebook, which already runs an event loop."""

import asyncio
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Self, TypeVar

T = TypeVar("T")


class LoopThread:
    """Context manager that runs an event loop in a separate thread."""

    def __enter__(self) -> Self:
        # Created here, so that the caller gets the error if no more files can be opened.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._serve, name="search-r1-loop", daemon=True)
        self._thread.start()
        return self

    def _serve(self) -> None:
        # An engine's child processes inherit this mask: Ctrl-C must stop the coroutine, not them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        with self._runner:
            self._loop.run_forever()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine; the future has its result, and cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of the coroutine; an interrupt of the caller cancels it."""
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine with `asyncio.run`, in another thread if this one already runs a loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with LoopThread() as thread:
        return thread.run(coroutine)
