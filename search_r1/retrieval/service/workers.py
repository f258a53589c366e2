"""Several server processes over one index, behind one port: started, watched, replaced in turn.

The parent owns the listening socket, so that no waiting connection is lost when a worker ends. Each
worker opens the engine itself; the pages of mapped files are shared. SIGHUP replaces the workers
one after another: a new one serves before an old one retires.
"""

import asyncio
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import psutil
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from search_r1.plain import configure_logging
from search_r1.retrieval.engines.registry import BACKENDS, ONLINE
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.service.app import Service
from search_r1.retrieval.service.running import (
    DrainingServer,
    configure,
    leave,
    listen,
    run_server,
    with_host_check,
    write_port,
)
from search_r1.retrieval.service.shared_metrics import FOLDER_VARIABLE, SharedMetrics, forget
from search_r1.retrieval.settings import ServerOptions
from verl.errors import explain
from verl.logs import exit_status

logger = logging.getLogger(__name__)

LINGER_S = 2.0
"""Seconds in which a retiring worker still answers on idle connections, and then closes them."""
STOP_SPARE_S = 10.0
"""Seconds beyond --drain that a worker has to end before it is killed."""
POLL_S = 0.2
RESPAWN_S = 1.0
"""Pause before a worker that ended by itself is replaced."""
THREADS = "OMP_NUM_THREADS"
Opener = Callable[[ServerOptions, SharedMetrics], FastAPI]
"""Opens the engine in a worker; it is imported there by its name."""


def check(options: ServerOptions) -> None:
    """Raise SetupError for options whose meaning would silently be multiplied by the workers."""
    name = options.retriever.retriever_name
    if BACKENDS.get(name) is ONLINE:
        why = "1 (each worker would send --requests_per_second, and one waits for many)"
    elif options.faults.is_on:
        why = "1 with --inject_failures, --inject_hangs (the n-th request has one outcome)"
    else:
        return
    raise SetupError(explain("--workers", options.workers, why, "leave --workers out"))


class Worker:
    """A worker process as its parent sees it."""

    def __init__(self, options: ServerOptions, bound: socket.socket, opener: Opener) -> None:
        self.pipe, child_pipe = get_context("spawn").Pipe()
        args = (options, bound, opener, child_pipe)
        self.process: SpawnProcess = get_context("spawn").Process(target=work, args=args)
        self.process.start()
        child_pipe.close()

    def is_ready(self, seconds: float) -> bool:
        """Return whether it serves, after waiting at most `seconds` for it."""
        try:
            return self.pipe.poll(seconds) and bool(self.pipe.recv())
        except EOFError:  # it ended
            return False

    def retire(self) -> None:
        """Let it answer what its clients have sent, and end."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)

    def end(self, seconds: float) -> bool:
        """Wait until it has ended, kill it after `seconds`; return whether it ended well."""
        self.process.join(seconds)
        if self.process.is_alive():
            logger.warning("worker %d did not end in time and was killed", self.process.pid)
            self.process.kill()
            self.process.join()
        self.pipe.close()
        return self.process.exitcode == 0


class Supervisor:
    """Keeps `options.workers` workers serving until SIGINT or SIGTERM."""

    def __init__(self, options: ServerOptions, bound: socket.socket, opener: Opener) -> None:
        self._options, self._bound, self._opener = options, bound, opener
        self._workers: list[Worker] = []
        self._is_stopping = self._is_renewing = False
        self._patience = options.service.drain + STOP_SPARE_S

    def run(self) -> int:
        """Serve, and return the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)
        address = listen(self._bound)
        for num_more in (1, self._options.workers - 1):  # the first builds a missing index
            more = [self._start() for _ in range(num_more)]
            self._workers += more
            if not all(self._wait_for(worker) for worker in more):
                return self._stop()
        if self._options.port_file is not None:
            write_port(self._options.port_file, self._bound.getsockname()[1])
        logger.info("serving on http://%s with %d workers", address, len(self._workers))
        while not self._is_stopping:
            wait([worker.process.sentinel for worker in self._workers], POLL_S)
            if self._is_renewing:
                self._is_renewing = False
                self._renew()
            self._replace_ended()
        return self._stop()

    def _note(self, number: int, _: object) -> None:
        if number == signal.SIGHUP:
            self._is_renewing = True
        else:
            self._is_stopping = True

    def _start(self) -> Worker:
        return Worker(self._options, self._bound, self._opener)

    def _wait_for(self, worker: Worker) -> bool:
        """Return whether the worker serves, as soon as it does, or ended, or all must stop."""
        while not self._is_stopping:
            if worker.is_ready(POLL_S):
                return True
            if not worker.process.is_alive():
                return False
        return False

    def _renew(self) -> None:
        """Replace all workers, one after another; a new one that fails leaves the rest as is."""
        for index, old in enumerate(self._workers):
            new = self._start()
            if not self._wait_for(new):
                new.process.terminate()
                new.end(self._patience)
                if not self._is_stopping:
                    logger.error("a new worker could not start: %d old ones serve on; correct "
                                 "what its message says, and send SIGHUP again",
                                 len(self._workers) - index)  # fmt: skip
                return
            self._workers[index] = new
            old.retire()
            old.end(self._patience)
            forget(old.process.pid)
        logger.info("all %d workers were replaced", len(self._workers))

    def _replace_ended(self) -> None:
        for index, worker in enumerate(self._workers):
            if self._is_stopping or worker.process.is_alive():
                continue
            logger.error("worker %s ended with status %s; it is started again",
                         worker.process.pid, worker.process.exitcode)  # fmt: skip
            worker.end(0)
            forget(worker.process.pid)
            time.sleep(RESPAWN_S)
            self._workers[index] = self._start()

    def _stop(self) -> int:
        """End all workers; return 1 if one had to be killed or failed, else 0."""
        for worker in self._workers:
            worker.process.terminate()
        ended_well = [worker.end(self._patience) for worker in self._workers]
        return int(not all(ended_well))


def supervise(options: ServerOptions, bound: socket.socket, opener: Opener) -> int:
    """Serve `options` with several workers on a bound socket, and return the exit status."""
    check(options)
    cores = len(psutil.Process().cpu_affinity() or [0])
    with tempfile.TemporaryDirectory(prefix="retriever-metrics-") as folder:
        os.environ[FOLDER_VARIABLE] = folder
        os.environ.setdefault(THREADS, str(max(1, cores // options.workers)))
        return Supervisor(options, bound, opener).run()


class WorkerServer(DrainingServer):
    """A server that hands its connections over to the other workers at SIGUSR1."""

    is_retiring = False

    def retire(self, *_: object) -> None:
        self.is_retiring = self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.is_retiring:
            for server in self.servers:
                server.close()  # accept nothing more: the parent's socket keeps what waits
            end = time.monotonic() + LINGER_S
            while self.server_state.connections and time.monotonic() < end:
                await asyncio.sleep(POLL_S / 4)
        await super().shutdown(sockets)

    def closing(self, app: ASGIApp) -> ASGIApp:
        """Return `app` with answers that ask clients to connect anew once this server retires."""

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_closing(message: Message) -> None:
                if message["type"] == "http.response.start" and self.is_retiring:
                    message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
                await send(message)

            await app(scope, receive, send_closing)

        return respond


def work(options: ServerOptions, bound: socket.socket, opener: Opener, parent: Connection) -> None:
    """Run one worker: the main function of its process."""
    configure_logging(logging.INFO, "%(asctime)s worker %(process)d %(levelname)s %(message)s")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal's, for the parent
    raise SystemExit(exit_status(lambda: leave(_serve(options, bound, opener, parent))))


def _serve(
    options: ServerOptions, bound: socket.socket, opener: Opener, parent: Connection
) -> bool:
    metrics = SharedMetrics()
    app = opener(_share(options), metrics)
    service: Service = app.state.service
    service.limits["workers"] = options.workers

    def announce() -> None:
        parent.send(True)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
        threading.Thread(target=metrics.refresh_forever, daemon=True).start()

    config = configure(app, bound, options.allowed_hosts, service.config.drain)
    server = WorkerServer(config, service, announce)
    config.app = server.closing(with_host_check(app, bound.getsockname()[0], options.allowed_hosts))
    signal.signal(signal.SIGUSR1, server.retire)
    return run_server(server, bound)


def _share(options: ServerOptions) -> ServerOptions:
    """Return a worker's options: its part of the memory for results."""
    cache_bytes = options.service.cache_bytes // options.workers
    return replace(options, service=replace(options.service, cache_bytes=cache_bytes))


def _end_with(parent: Connection) -> None:
    """End this process once its parent has: nobody else would."""
    wait([parent])
    os.kill(os.getpid(), signal.SIGTERM)
