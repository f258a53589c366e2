"""Apps on real ports, for any test that needs a server."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from search_r1.search.retrieval_server import bind


class PromptServer(uvicorn.Server):
    """A server that notices within 10 ms that it must stop; uvicorn takes up to 100 ms."""

    async def main_loop(self) -> None:
        ticks = 0
        while not await self.on_tick(ticks):
            ticks += 1
            await asyncio.sleep(0.01)


@contextmanager
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
