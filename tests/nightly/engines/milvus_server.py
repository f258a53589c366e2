"""A real Milvus server of its wheel (`pip install milvus`) that can be killed and started again."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from pymilvus import MilvusClient, MilvusException

STALL_S, LIMIT_S = 60.0, 600.0
"""A start is given up when its files have not grown for the one, or after the other in all."""
ETCD_PORT = 2379
"""Of every standalone Milvus, so that a machine has one at a time."""


class MilvusServer:
    """Context manager; data and log are in `folder`, the port stays the same after a kill."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def uri(self, collection: str) -> str:
        return f"milvus://127.0.0.1:{self._port}/{collection}"

    def start(self) -> float:
        """Start the server; return the seconds until it answers.

        A loaded machine takes long, but unpacks and logs all the while. Raises RuntimeError.
        """
        start = grown = time.monotonic()
        size = 0
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), cwd=self._folder, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | self._environment(),
            )  # fmt: skip
        while self._process.poll() is None:
            try:
                MilvusClient(self.address, timeout=2).list_collections(timeout=2)
                return time.monotonic() - start
            except MilvusException:
                time.sleep(0.5)
            now, before, size = time.monotonic(), size, self._size()
            grown = now if size > before else grown
            if now > min(grown + STALL_S, start + LIMIT_S):
                break
        raise RuntimeError(self._failure(time.monotonic() - start, time.monotonic() - grown))

    def _size(self) -> int:
        """Return the bytes of program, data and logs; a file may vanish meanwhile."""
        sizes = 0
        for folder, _, names in os.walk(self._folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    sizes += os.stat(os.path.join(folder, name)).st_size
        return sizes

    def _failure(self, seconds: float, idle: float) -> str:
        """End the server; return what became of it, and the last lines of its logs."""
        state = self._process.poll()
        self.kill()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", ETCD_PORT)) == 0:
                return f"another Milvus is at port {ETCD_PORT}: stop it"
        fate = "still running" if state is None else f"ended with {state}"
        logs = [self._folder / "server.log", *sorted(self._folder.glob("logs/*.log"))]
        return "\n".join(
            [f"Milvus did not answer within {seconds:.0f} s ({fate}; no progress for {idle:.0f} s)"]
            + [f"{log.name}: {log.read_text(errors='replace')[-1000:]}" for log in logs]
        )

    def _command(self) -> list[str]:
        """Return the wheel's command, or once that has written its settings, the program itself.

        The command takes another port while connections of the killed server are not yet forgotten.
        """
        program = self._folder / "bin" / "milvus"
        if program.exists():
            return [str(program), "run", "standalone"]
        wrapper = Path(sys.executable).parent / "milvus-server"
        return [str(wrapper), "--data", str(self._folder), "--proxy-port", str(self._port)]

    def _environment(self) -> dict[str, str]:
        """Return what the wheel's command sets for the program."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        folder = self._folder
        libraries = {"LD_LIBRARY_PATH": str(folder / "bin"), "MILVUS_RUN_DIR": str(folder / "run")}
        return libraries | {"DEPLOY_MODE": "STANDALONE", "METRICS_PORT": str(port)}

    def kill(self) -> None:
        """Kill the server and its wrapper as a power failure would."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> "MilvusServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
