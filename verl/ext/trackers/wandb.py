"""Weights & Biases: without account or server a run is offline, and can be uploaded later."""

import logging
import os
import secrets
from collections.abc import Mapping

from verl.monitor.tracking import TrackedRun, Tracker, package

logger = logging.getLogger(__name__)

INIT_S = 10
"""Seconds to wait for wandb's server before the run is offline."""


class WandbTracker(Tracker):
    """A run of wandb; if `WANDB_MODE` is set, it alone decides whether the run is online."""

    def __init__(self, run: TrackedRun) -> None:
        wandb, chosen = package("wandb"), os.environ.get("WANDB_MODE")
        folder = os.path.abspath(os.environ.get("WANDB_DIR") or run.directory)
        os.makedirs(folder, exist_ok=True)  # if it is missing, wandb uses /tmp
        run_id = run.library_id("wandb", lambda: secrets.token_hex(4))
        limits = wandb.Settings(init_timeout=INIT_S, finish_timeout=120)
        options = {**run.names(), "id": run_id, "dir": folder, "settings": limits}
        mode = chosen or (None if wandb.login(prompt=False, verify=False) else "offline")
        try:
            self._run = wandb.init(**options, mode=mode, resume="allow")
        except wandb.errors.Error as error:
            if chosen:
                raise
            wandb.teardown()  # after a failed start, its service says that the id is in use
            self._run = wandb.init(**options, mode="offline")
            logger.warning("wandb: logged offline, because of: %s", error)
        self._upload = f"wandb sync --id {run_id} {folder}/wandb/offline-run-*-{run_id}"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
        if self._run.settings.mode == "offline":
            logger.info("wandb: on a machine with network and `wandb login`: %s", self._upload)
