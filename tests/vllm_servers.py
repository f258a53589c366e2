"""vLLM's own server on the CPU, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import httpx

from verl.ports import free_port
from verl.rollout.vllm_settings import WORKER_EXTENSION

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
}  # fmt: skip
START_S = 240.0


class Served:
    """A server like that of `vllm serve MODEL`, a command that vLLM's CPU build lacks.

    It can be started again after `kill`, on the same port.
    """

    def __init__(self, model: Path, log: Path, max_model_len: int, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--host", "127.0.0.1", "--port", str(self.port), "--max-model-len", str(max_model_len),
            "--dtype", "float32", "--enforce-eager", "--no-enable-chunked-prefill",
            "--max-num-seqs", "16", "--worker-extension-cls", WORKER_EXTENSION, *options,
        ]  # fmt: skip

    def start(self) -> Self:
        """Start the server; `wait` waits until it answers."""
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        return self

    def wait(self) -> None:
        """Wait until the server answers."""
        end = time.monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None, self._log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < end, "the server took too long"
            time.sleep(0.5)

    def kill(self) -> None:
        """Kill the server and its engine core at once, so that no process is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the server leads this process group
        self._process.wait()

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).is_success
        except httpx.TransportError:
            return False
