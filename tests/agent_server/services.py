"""A service with a scripted agent on a real port."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import uvicorn

from search_r1.agent_server.app import Service, build_app
from search_r1.inference.dialogue import AgentSession
from search_r1.search.server.running import bind

MODEL = "search-r1"


@contextlib.contextmanager
def serving(session: AgentSession, token: str | None = None) -> Iterator[str]:
    """The base address of a service of `session`, ended with the context."""
    config = uvicorn.Config(
        build_app(Service(session, MODEL, token)),
        lifespan="off",
        log_level="critical",
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    with bind("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            deadline = time.monotonic() + 30
            while not server.started:
                assert thread.is_alive() and time.monotonic() < deadline
                time.sleep(0.01)
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
