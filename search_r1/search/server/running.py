"""A service on a port: bound early, announced when ready, drained at SIGINT or SIGTERM."""

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Collection
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from search_r1.search.errors import SetupError
from search_r1.search.server.app import Service
from search_r1.search.server.config import TOKEN_VARIABLE
from search_r1.search.server.connections import SEND_S, configure
from search_r1.search.server.hosts import LOOPBACK, checked
from search_r1.search.server.http_errors import misdirected
from verl.files import whole_file

logger = logging.getLogger(__name__)

BACKLOG = 2048


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
    """Serve `app` on a bound socket until SIGINT or SIGTERM; accepted requests are finished.

    Called from the main thread. Returns whether no search was left running. Raises SetupError for
    a port that another server took meanwhile.
    """
    service: Service = app.state.service
    guarded = checked(app, bound.getsockname()[0], allowed_hosts, misdirected)
    config = configure(guarded, service.config.max_body_bytes, service.config.drain)
    address = listen(bound)
    logger.info("serving on http://%s", address)
    # uvicorn raises the signal again when it is done, which would skip the closing of files; from
    # here on the process ends by itself. Unlike a handler, this also holds while Python finalises.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # what is loaded stays: no collection goes through it again
    with contextlib.suppress(KeyboardInterrupt):
        _Server(config, service, port_file, bound.getsockname()[1]).run(sockets=[bound])
    return service.close()


def listen(bound: socket.socket) -> str:
    """Take connections from now on; the address. Raises SetupError if another server does.

    Two sockets may be bound to one port, but only one of them listens.
    """
    host, port = bound.getsockname()[:2]
    if sys.platform == "linux":  # ends a connection, also a closed one, whose peer takes nothing
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SEND_S))
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise _taken(host, port, error) from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(host: str, port: int, port_file: Path | None = None) -> socket.socket:
    """A socket bound to the address, not yet listening.

    Raises SetupError if it is taken, or if `port_file` could not be written once it listens.
    """
    if not host:
        raise SetupError("--host is empty; expected an address, as 127.0.0.1, or 0.0.0.0 for all")
    if port_file is not None:
        _check(port_file)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError, TypeError) as error:  # TypeError: no host name at all
        bound.close()
        raise _taken(host, port, error) from error
    return bound


def _check(port_file: Path) -> None:
    """A port file replaces what is there: never a device, nor anything that is no file."""
    folder = port_file.parent
    if port_file.exists() and not port_file.is_file():
        raise SetupError(
            f"--port_file {port_file} is no file; expected a new one, or one to replace"
        )
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise SetupError(f"--port_file {port_file}: {folder} is no folder that may be written; "
                         "expected one that may")  # fmt: skip


def _taken(host: str, port: int, error: Exception) -> SetupError:
    return SetupError(
        f"cannot serve on {host}:{port} ({error}); expected a free port of this machine: "
        "give another --port, or --port 0 for any free one"
    )


def write_port(file: Path, port: int) -> None:
    """Say in a file which port is served; it appears whole or not at all."""
    try:
        with whole_file(file) as part:
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
