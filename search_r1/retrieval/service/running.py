"""Runs the service: binds its port early, reports when it is ready, and drains it at SIGTERM."""

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp

from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.schema import TOKEN_VARIABLE
from search_r1.retrieval.service.app import Service
from verl.errors import explain
from verl.files import atomic_write

logger = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = 75
MAX_HEAD_BYTES = 64 * 2**10
"""Largest request line with headers, if uvicorn parses with h11."""
MAX_DESCRIPTORS = 65_536
"""File descriptors to ask for if the hard limit is higher."""
SPARE_DESCRIPTORS = 128
"""File descriptors kept for files; all others may be connections."""
LOOPBACK = ("127.", "::1")
"""Prefixes of addresses that only this machine can reach."""


class DrainingServer(uvicorn.Server):
    """A uvicorn server that calls `on_start` once it serves, and drains its service at the end."""

    def __init__(
        self, config: uvicorn.Config, service: Service, on_start: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.service = service
        self._on_start = on_start
        service.limits["max_connections"] = config.limit_concurrency

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.is_draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.drain()
        await super().shutdown(sockets=sockets)


def serve(
    app: FastAPI,
    bound: socket.socket,
    port_file: Path | None = None,
    allowed_hosts: Collection[str] = (),
) -> bool:
    """Serve until SIGINT or SIGTERM; return whether all searches ended. Raises SetupError."""
    service: Service = app.state.service
    config = configure(app, bound, allowed_hosts, service.config.drain)
    logger.info("serving on http://%s", listen(bound))

    def announce() -> None:
        if port_file is not None:
            write_port(port_file, bound.getsockname()[1])

    return run_server(DrainingServer(config, service, announce), bound)


def run_server(server: DrainingServer, bound: socket.socket) -> bool:
    """Run the server until a signal ends it; return whether all searches ended."""
    gc.collect()
    gc.freeze()  # exclude all that is loaded now from later collections
    # uvicorn raises the signal again after its shutdown, which would skip the closing of files.
    # With SIG_IGN this has no effect, even while Python finalises, unlike with a handler.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[bound])
    return server.service.close()


def leave(is_idle: bool) -> int:
    """Return the exit status; ends the process if a thread that still searches would keep it."""
    if not is_idle:
        logger.warning("stopped in the middle of a search that did not end in time")
        logging.shutdown()
        os._exit(1)
    return 0


def configure(
    app: ASGIApp, bound: socket.socket, allowed_hosts: Collection[str], drain: float
) -> uvicorn.Config:
    """Return uvicorn's settings for `app`; at shutdown accepted requests have `drain` seconds.

    Raises the limit of file descriptors, which bounds the connections; others get 503.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = min(hard, MAX_DESCRIPTORS) if hard != resource.RLIM_INFINITY else MAX_DESCRIPTORS
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return uvicorn.Config(
        with_host_check(app, bound.getsockname()[0], allowed_hosts),
        ws="none",
        log_level="warning",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        lifespan="off",
        server_header=False,
        limit_concurrency=max(1, limit - SPARE_DESCRIPTORS),
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(drain) + 2,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )


def listen(bound: socket.socket) -> str:
    """Start to listen and return the address; raises SetupError if another server listens there."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _cannot_serve(host, port, error) from error
    return address(bound)


def address(bound: socket.socket) -> str:
    """Return the `host:port` of a bound socket as in a URL."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(host: str, port: int, port_file: Path | None = None) -> socket.socket:
    """Return a bound socket; raises SetupError if this fails or `port_file` is not writable."""
    if not host:
        raise SetupError("--host is empty; expected an address: 127.0.0.1, or 0.0.0.0 for all")
    # The port file is renamed over an existing path, which must not be a device or a folder.
    if port_file is not None and (
        not os.access(port_file.parent, os.W_OK)
        or (port_file.exists() and not port_file.is_file())
        or not port_file.parent.is_dir()
    ):
        raise SetupError(
            f"--port_file {port_file} is not a file, or {port_file.parent} is not a writable "
            "folder; expected a new file, or one to replace"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:  # this machine has no IPv6
        raise _cannot_serve(host, port, error) from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError, TypeError) as error:  # TypeError: not a host name
        bound.close()
        raise _cannot_serve(host, port, error) from error
    return bound


def _cannot_serve(host: str, port: int, error: Exception) -> SetupError:
    return SetupError(
        f"cannot serve on {host}:{port} ({error}); expected a free port of this machine, at one "
        "of its addresses: give another --port, or --port 0 for any free one, or another --host"
    )


def write_port(file: Path, port: int) -> None:
    try:
        with atomic_write(file) as part:
            part.write_text(f"{port}\n")
    except OSError as error:
        raise SetupError(f"--port_file {file} cannot be written ({error})") from error


def warn_if_open(
    bound: socket.socket, token: str | None, fix: str = f"set {TOKEN_VARIABLE}"
) -> None:
    """Warn if the server is reachable from the network without a token."""
    host = bound.getsockname()[0]
    if not token and not host.startswith(LOOPBACK):
        logger.warning(
            "bound to %s without a token: anyone who can reach this address can search; %s, "
            "or bind to 127.0.0.1",
            host,
            fix,
        )


def with_host_check(app: ASGIApp, bound_to: str, allowed: Collection[str]) -> ASGIApp:
    """Return `app` with a check of the `Host` header, against DNS rebinding.

    A web page could let its own host name resolve to this machine and then read the responses; its
    requests have that name in `Host`. There is no check if `allowed` is empty and the app is bound
    to a network address. Raises SetupError for a pattern that is no name.
    """
    if not (allowed or bound_to.startswith(LOOPBACK)):
        return app
    address = f"[{bound_to}]" if ":" in bound_to else bound_to
    own = ("localhost", "*.localhost", "127.0.0.1", "[::1]", address)
    try:
        return TrustedHostMiddleware(app, [*allowed, *own], www_redirect=False)
    except AssertionError as error:
        fix = "--allowed_hosts node17 *.example.com, or * for any"
        raise SetupError(explain("--allowed_hosts", " ".join(allowed), str(error), fix)) from error
