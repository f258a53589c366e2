"""A service on a port: bound early, announced when ready, drained at SIGTERM; its names."""

import contextlib
import functools
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from search_r1.search.errors import SetupError
from search_r1.search.schema import TOKEN_VARIABLE
from search_r1.search.server.app import Service
from search_r1.search.server.connections import SEND_S, configure
from search_r1.search.server.requests import misdirected
from verl.files import atomic_write

logger = logging.getLogger(__name__)

BACKLOG = 2048
ANY = "*"
LOOPBACK = ("127.", "::1")


class _Server(uvicorn.Server):
    """A uvicorn server that writes its port to a file, and drains its service before it stops."""

    def __init__(
        self, config: uvicorn.Config, service: Service, port_file: Path | None, port: int
    ) -> None:
        super().__init__(config)
        self._service = service
        self._port_file = port_file
        self._port = port

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then write the port."""
        await super().startup(sockets=sockets)
        if self._port_file is not None and self.started:
            write_port(self._port_file, self._port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """From now on new requests are refused; uvicorn then waits for those accepted."""
        self._service.is_draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer what was accepted, within the seconds allowed."""
        self._service.drain()
        await super().shutdown(sockets=sockets)


def serve(
    app: FastAPI,
    bound: socket.socket,
    port_file: Path | None = None,
    allowed_hosts: Collection[str] = (),
) -> bool:
    """Serve until SIGINT or SIGTERM; whether no search was left running. Raises SetupError."""
    service: Service = app.state.service
    guarded = with_host_check(app, bound.getsockname()[0], allowed_hosts, misdirected)
    config = configure(guarded, service.config.max_body_bytes, service.config.drain)
    logger.info("serving on http://%s", listen(bound))
    # uvicorn raises the signal again when it is done, which would skip the closing of files; from
    # here on the process ends by itself. Unlike a handler, this also holds while Python finalises.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # what is loaded stays: no collection goes through it again
    with contextlib.suppress(KeyboardInterrupt):
        _Server(config, service, port_file, bound.getsockname()[1]).run(sockets=[bound])
    return service.close()


def listen(bound: socket.socket) -> str:
    """Take connections at the address that is returned; SetupError if another server does."""
    if sys.platform == "linux":  # ends a connection, also a closed one, whose peer takes nothing
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_S))
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _taken(host, port, error) from error
    return address(bound)


def address(bound: socket.socket) -> str:
    """Where a bound socket is reached, as it stands in a URL."""
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(host: str, port: int, port_file: Path | None = None) -> socket.socket:
    """A bound socket; raises SetupError if it is taken or `port_file` could not be written."""
    if not host:
        raise SetupError("--host is empty; expected an address, as 127.0.0.1, or 0.0.0.0 for all")
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
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError, TypeError) as error:  # TypeError: no host name at all
        bound.close()
        raise _taken(host, port, error) from error
    return bound


def _taken(host: str, port: int, error: Exception) -> SetupError:
    return SetupError(
        f"cannot serve on {host}:{port} ({error}); expected a free port of this machine, at an "
        "address that it has: give another --port, or --port 0 for any free one, or --host"
    )


def write_port(file: Path, port: int) -> None:
    """Say in a file which port is served; it appears whole or not at all."""
    try:
        with atomic_write(file) as part:
            part.write_text(f"{port}\n")
    except OSError as error:
        raise SetupError(f"--port_file {file} cannot be written ({error})") from error


def read_token(variable: str) -> str | None:
    """The token of the environment; raises SetupError for one that no header can hold."""
    token = os.environ.get(variable)
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise SetupError(
            f"{variable} (not shown) has spaces or characters that a header cannot hold; "
            "expected printable ASCII"
        )
    return token or None


def warn_if_open(
    bound: socket.socket, token: str | None, fix: str = f"set {TOKEN_VARIABLE}"
) -> None:
    """Say when anyone in the network may search."""
    host = bound.getsockname()[0]
    if not token and not host.startswith(LOOPBACK):
        logger.warning(
            "bound to %s without a token: whoever reaches this address may search; %s, "
            "or bind to 127.0.0.1",
            host,
            fix,
        )


def with_host_check(
    app: ASGIApp, address: str, allowed: Collection[str], refuse: Callable[[str], Response]
) -> ASGIApp:
    """`app` behind a look at `Host`, where it is bound to this machine alone or names are given.

    A page of a browser can have its own name lead to this machine (DNS rebinding), and would then
    read what is answered: its requests carry that name. Addresses and `localhost` cannot be made
    to lead elsewhere. `address`: what it is bound to. `refuse`: the answer to another name.
    """
    if ANY in allowed or not (allowed or address.startswith(LOOPBACK)):
        return app
    names = {name.lower().rstrip(".") for name in allowed}

    @functools.lru_cache(1024)
    def is_mine(host: bytes) -> bool:
        """Whether it is an address, `localhost`, or one of `names`, at any port."""
        name = host.decode("latin-1").strip().lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") < 2:
            name = name.partition(":")[0]
        name = name.rstrip(".")
        if name in names or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    async def check(scope: Scope, receive: Receive, send: Send) -> None:
        for name, host in scope.get("headers", ()):
            if name == b"host" and not is_mine(host):
                shown = ascii(host.decode("latin-1")[:100])
                text = f"this server has no name {shown}; its --allowed_hosts can give it one"
                await refuse(text)(scope, receive, send)
                return
        await app(scope, receive, send)

    return check
