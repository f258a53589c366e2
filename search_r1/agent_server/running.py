"""The agent server as a process: a port, the agent, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

import uvicorn
from transformers.utils import logging as transformers_logging

from search_r1.agent_server.app import Service, build_app
from search_r1.agent_server.errors import misdirected
from search_r1.inference.opening import opened
from search_r1.plain import log
from search_r1.search.server.connections import configure
from search_r1.search.server.hosts import checked
from search_r1.search.server.running import bind, listen, read_token, warn_if_open, write_port
from search_r1.serve import ServingOptions

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "AGENT_TOKEN"
GRACE_S = 8
"""Seconds that dialogues are given to end when the service is told to."""


async def serve(options: ServingOptions, bound: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM. Raises UserError when the agent cannot be opened."""
    token = read_token(TOKEN_VARIABLE)
    warn_if_open(bound, token, f"set {TOKEN_VARIABLE}")
    async with opened(options) as session:
        service = Service(session, options.name, token, options.max_body_bytes, options.chat_peers)
        app = build_app(service)
        guarded = checked(app, bound.getsockname()[0], options.allowed_hosts, misdirected)
        server = uvicorn.Server(configure(guarded, options.max_body_bytes, GRACE_S))
        address = listen(bound)
        # uvicorn raises the signal again once it is done, which would cut short the closing of
        # the engine.
        for ending in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ending, signal.SIG_IGN)
        running = asyncio.ensure_future(server.serve(sockets=[bound]))
        while not server.started and not running.done():
            await asyncio.sleep(0.05)
        told = "%s answers at http://%s/v1; chat page: http://%s"
        logger.info(told, options.name, address, address)
        if options.port_file is not None:
            write_port(options.port_file, bound.getsockname()[1])
        await running


def start(options: ServingOptions) -> int:
    """Serve; returns the exit code. Raises UserError or SetupError for a user's mistake."""
    log(logging.INFO, "%(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "vllm"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    with bind(options.host, options.port, options.port_file) as bound:
        asyncio.run(serve(options, bound))
    return 0
