"""What the demo adds to its run: a page with the growing curve, and a control at the end.

The control is one more validation, without documents, by the run's engines: the demo's retrieval
server is replaced at its address by one that finds nothing.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from search_r1.retrieval.local_server import LocalServer
from verl.config import Config
from verl.trainer.hooks import Hook
from verl.trainer.loop import RayPPOTrainer
from verl.trainer.validate import Validation, validate

logger = logging.getLogger(__name__)

SERVER_VARIABLE = "DEMO_RETRIEVER_PID"
"""Variable with the process id of the retrieval server that the control ends."""
STOP_S = 15.0
VIEW = "search_r1.view.command"


class Page(Hook):
    """Shows the run in a browser while it trains."""

    def __init__(self, config: Config) -> None:
        self.folder = Path(config.trainer.default_local_dir)

    @contextlib.contextmanager
    def running(self, trainer: RayPPOTrainer) -> Iterator[None]:
        """Serve the page during the run."""
        log = self.folder / "view.log"
        with LocalServer([str(self.folder)], module=VIEW, log_path=log) as server:
            logger.info("the curve and every dialogue, while it trains: %s", server.url)
            yield


class WithoutDocuments(Hook):
    """Validates the trained policy with an empty retriever; writes to the folder `empty`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path(config.trainer.default_local_dir) / "empty"

    def on_end(self, trainer: RayPPOTrainer) -> None:
        """Replace the server and validate once more."""
        address = urlsplit(self.config.retriever.url)
        assert address.hostname and address.port, "the demo's server has an address"
        engines = trainer.rollouts  # not what the run samples with: it refuses another index
        assert engines is not None, "the demo samples"
        os.kill(int(os.environ[SERVER_VARIABLE]), signal.SIGTERM)
        wait_until_closed(address.hostname, address.port)
        (rows,) = (hook for hook in trainer.hooks if isinstance(hook, Validation))
        path = self.folder / "validation" / f"step_{trainer.step}.jsonl"
        log = self.folder / "retriever.log"
        empty = LocalServer(["--retriever_name", "empty"], port=address.port, log_path=log)
        with empty, trainer.during("validate"):
            metrics = validate(self.config, engines, rows.prompts, rows.reward, path)
        line = json.dumps({"step": trainer.step, **metrics})
        (self.folder / "metrics.jsonl").write_text(f"{line}\n", encoding="utf-8")


def wait_until_closed(host: str, port: int) -> None:
    """Wait until nothing listens at an address. Raises TimeoutError."""
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.05)
    raise TimeoutError(f"the retrieval server at {host}:{port} did not end in {STOP_S:.0f} s")
