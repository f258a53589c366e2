"""SwanLab: online with an account (`swanlab login`), else offline; `SWANLAB_MODE` overrides it."""

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from verl.monitor.tracking import TrackedRun, Tracker, package

logger = logging.getLogger(__name__)


class SwanlabTracker(Tracker):
    """A run of SwanLab in `SWANLAB_LOG_DIR`, or `swanlog` in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        folder = Path(os.environ.get("SWANLAB_LOG_DIR") or run.directory / "swanlog")
        folder.mkdir(parents=True, exist_ok=True)
        home = Path(os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab").expanduser()
        has_key = bool(os.environ.get("SWANLAB_API_KEY")) or (home / ".netrc").exists()
        mode = os.environ.get("SWANLAB_MODE") or ("online" if has_key else "offline")
        self._folder, self._mode, self._swanlab = folder, mode, package("swanlab")
        run_id = run.library_id("swanlab", lambda: secrets.token_hex(11)[:21])
        self._swanlab.init(
            **run.names(), log_dir=str(folder), mode=mode, id=run_id, resume="allow", reinit=True
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()
        if self._mode == "offline":
            logger.info("swanlab: after `swanlab login`: swanlab sync %s/*", self._folder)
