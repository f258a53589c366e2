"""Trackio: no server is started; with `TRACKIO_SPACE_ID` it sends the run to a hub Space itself."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from verl.monitor.tracking import TrackedRun, Tracker, package

logger = logging.getLogger(__name__)


class TrackioTracker(Tracker):
    """A run of Trackio in `TRACKIO_DIR`, or `trackio` in the run's folder."""

    def __init__(self, run: TrackedRun) -> None:
        # Trackio reads the variable when it is imported.
        self._folder = os.environ.setdefault("TRACKIO_DIR", f"{run.directory}/trackio")
        Path(self._folder).mkdir(parents=True, exist_ok=True)
        self._trackio = package("trackio")
        resume = "allow" if run.is_resumed else "never"
        self._trackio.init(**run.names(), embed=False, resume=resume)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()
        logger.info("trackio: TRACKIO_DIR=%s trackio show", self._folder)
