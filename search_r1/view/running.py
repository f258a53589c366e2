"""The page's process: it polls the runs' files, serves a port, and shuts down in order."""

import logging
import signal
import sqlite3
import sys
import threading
from collections.abc import Sequence

import uvicorn

from search_r1.bearer import read_token
from search_r1.plain import configure_logging
from search_r1.retrieval.service.running import (
    LOOPBACK,
    bind,
    configure,
    listen,
    write_port,
)
from search_r1.view.app import TOKEN_VARIABLE, Runs, create_app
from search_r1.view.command import ViewOptions
from search_r1.view.run import Run
from verl.errors import ConfigError, explain

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two checks for new files of the runs."""
SWITCH_S = 0.001
"""Interpreter switch interval: how long the reader thread may delay a request at a time."""


def start(options: ViewOptions) -> int:
    """Serve the page; return the exit code. Raises UserError or SetupError."""
    configure_logging(logging.INFO, "%(message)s")
    if not options.runs:
        fix = "search-r1 view RUN"
        raise ConfigError(explain("RUN", "nothing", "the folder of at least one run", fix))
    index_dir = options.index_dir.expanduser()
    first, *others = options.runs
    runs = [Run(first, index_dir, options.rollouts), *(Run(run, index_dir) for run in others)]
    return serve(options, runs)


def serve(options: ViewOptions, runs: Sequence[Run]) -> int:
    """Serve until SIGINT or SIGTERM, and meanwhile read what the runs write."""
    token = read_token(TOKEN_VARIABLE)
    with bind(options.host, options.port, options.port_file) as server_socket:
        host = server_socket.getsockname()[0]
        if token is None and not host.startswith(LOOPBACK):
            got = f"{options.host} without a token"
            fix = f"set {TOKEN_VARIABLE}, or omit --host and forward the port with ssh -L"
            expected = "a token for an address that other machines can reach"
            raise ConfigError(explain("--host", got, expected, fix))
        app = create_app(Runs(runs), token)
        server = uvicorn.Server(configure(app, server_socket, options.allowed_hosts, drain=2))
        ended = threading.Event()
        reader = threading.Thread(target=follow, args=(runs, ended), name="view-reader")

        address = listen(server_socket)
        if options.port_file is not None:
            write_port(options.port_file, server_socket.getsockname()[1])
        logger.info("http://%s shows %s", address, ", ".join(str(run.folder) for run in runs))
        sys.setswitchinterval(SWITCH_S)
        reader.start()
        # uvicorn raises the signal again when it has shut down; that would skip the lines below.
        for shutdown_signal in (signal.SIGINT, signal.SIGTERM):
            signal.signal(shutdown_signal, signal.SIG_IGN)
        try:
            server.run(sockets=[server_socket])
        finally:
            ended.set()
            reader.join()
    return 0


def follow(runs: Sequence[Run], ended: threading.Event) -> None:
    """Read what the runs write until `ended` is set; log each error once and try again."""
    logged: set[str] = set()
    while not ended.is_set():
        for run in runs:
            try:
                run.refresh(ended)
            except (OSError, ConfigError, sqlite3.Error) as error:
                if str(error) not in logged:
                    logged.add(str(error))
                    logger.warning("%s: %s", run.folder, error)
        ended.wait(POLL_S)
