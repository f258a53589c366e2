"""The service's command line: options, a port, the agent, and an orderly end."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from transformers.utils import logging as transformers_logging

from search_r1.agent_server.app import Service, build_app
from search_r1.inference.opening import AskingOptions, opened
from search_r1.inference.options import option
from search_r1.search.errors import SetupError
from search_r1.search.server.running import bind, warn_if_open, write_port
from verl.errors import SearchR1Error

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "AGENT_TOKEN"
GRACE_S = 10
"""Seconds that dialogues are given to end when the service is told to."""


@dataclass(frozen=True)
class ServingOptions(AskingOptions):
    """An agent behind a port."""

    engine: str = option("vllm", "what generates", choices=("vllm", "transformers"))
    concurrency: int = option(256, "dialogues played at once", int)
    name: str = option("search-r1", "what clients call the model")
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8001, "port to listen on; 0 for any free one", int)
    port_file: str | None = option(None, "write the port here once it is served")


async def serve(options: ServingOptions, bound: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM. Raises SearchR1Error when the agent cannot be opened."""
    token = os.environ.get(TOKEN_VARIABLE) or None
    host, port = bound.getsockname()[:2]
    warn_if_open(bound, token, TOKEN_VARIABLE)
    async with opened(options) as asker:
        app = build_app(Service(asker, options.name, token))
        server = _server(app)
        # uvicorn raises the signal again once it is done, which would cut short the closing of
        # the engine.
        for ending in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ending, signal.SIG_IGN)
        running = asyncio.ensure_future(server.serve(sockets=[bound]))
        while not server.started and not running.done():
            await asyncio.sleep(0.05)
        logger.info("%s answers at http://%s:%d/v1", options.name, host, port)
        if options.port_file:
            write_port(Path(options.port_file), port)
        await running


def _server(app: FastAPI) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    return uvicorn.Server(config)


def parser() -> argparse.ArgumentParser:
    """The command line; defaults live in the options alone."""
    whole = argparse.ArgumentParser(
        prog="python -m search_r1.serve",
        description="The search agent behind an OpenAI-compatible server.",
        argument_default=argparse.SUPPRESS,
    )
    for name, more in ServingOptions.arguments():
        whole.add_argument(name, **more)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "vllm"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    given = parser().parse_args(argv)
    try:
        options = ServingOptions.given(vars(given))
        bound = bind(options.host, options.port)
        with bound:
            asyncio.run(serve(options, bound))
    except (SearchR1Error, SetupError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:  # while the agent was being opened
        return 130
    return 0
