"""Runs a retrieval server as a child process, for scripts and tests."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from search_r1.retrieval.errors import RetrieverUnavailable

REPOSITORY = Path(__file__).resolve().parents[2]
MODULE = "search_r1.retrieval.command"
POLL_S = 0.05
STOP_S = 10.0
LOG_TAIL_BYTES = 2000


class LocalServer:
    """Context manager that runs a retrieval server on a free port.

    Example: `with LocalServer(["--corpus_path", "example/corpus.jsonl"]) as server: server.url`
    """

    def __init__(
        self,
        args: list[str],
        *,
        port: int = 0,
        timeout: float = 120.0,
        log_path: str | Path | None = None,
        module: str = MODULE,
    ) -> None:
        """`args` are the server's flags without host and port; port 0 selects a free port.

        `timeout` (s) limits the start, until the server listens. Another `module` must accept
        --host, --port and --port_file as well, and write that file when it accepts connections.
        """
        self._args = args
        self._timeout = timeout
        self._log_path = log_path
        self._module = module
        self.port = port

    @property
    def url(self) -> str:
        """Base address; valid after `start`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Exit status of the server; None while it runs."""
        return self._process.poll()

    def start(self) -> Self:
        """Start the server and wait until it listens; raises RetrieverUnavailable with its log."""
        self._folder = tempfile.TemporaryDirectory(prefix="retriever-")
        self._log = Path(self._log_path or Path(self._folder.name) / "server.log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        port_file = Path(self._folder.name) / "port"
        command = [sys.executable, "-m", self._module, *self._args]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--port_file", str(port_file)]
        paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        try:
            deadline = time.monotonic() + self._timeout
            while not port_file.exists():  # written once requests are accepted
                self._check_alive(deadline)
                time.sleep(POLL_S)
            self.port = int(port_file.read_text())
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Terminate the server; kill it if it has not ended after ten seconds."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self.kill()  # no effect on a process that has ended

    def kill(self) -> None:
        """Kill the server at once, as a crash would. A later `start` uses the same port."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _check_alive(self, deadline: float) -> None:
        status = self._process.poll()
        if status is None and time.monotonic() < deadline:
            return
        outcome = "did not start to listen in time" if status is None else f"exited with {status}"
        log = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        raise RetrieverUnavailable(
            f"the retrieval server {outcome} (limit {self._timeout} s); end of its log:\n{log}"
        )
