"""Apps on real ports, for any test that needs a server."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from search_r1.retrieval.server import bind


class PromptServer(uvicorn.Server):
    """A server that stops within 10 ms; uvicorn takes up to 200 ms, although nothing is running."""

    async def main_loop(self) -> None:
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 1
            await asyncio.sleep(0.01)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close idle connections and wait for running requests, with uvicorn's time limit."""
        for closable in (*self.servers, *(sockets or ())):
            closable.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.002)
        for task in self.server_state.tasks:
            task.cancel()


@contextlib.contextmanager
def running(app: Any, port: int = 0) -> Iterator[str]:
    """Serve `app` with uvicorn in a thread on `port` (0: a free one); yield its base address."""
    bound = bind("127.0.0.1", port)
    server = PromptServer(
        uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=5)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
