"""MLflow, SwanLab and Trackio as trackers, each by its own library.

Without an address or an account of the user's, all of them write below the run's folder: nothing
leaves the machine unasked. A run that is resumed goes on in the same run of theirs. What a library
cannot take is an OSError, which `Tracking` spares a run that has `metrics.jsonl`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import string
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.config.known import flattened
from verl.errors import ConfigError, explain
from verl.monitor.wandb_tracker import kept_id, load

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 1000
"""Metrics that MLflow takes in one call."""
MOST_PARAMETERS, MOST_CHARACTERS = 100, 6000
"""Options that it takes in one call, and characters of each."""
FOREIGN = re.compile(r"[^\w./ :-]")
"""Characters that it has in no name."""
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""How long a server that is away may keep a step waiting; its own defaults are minutes."""
SWANLAB_ID = 21
"""Characters of a run's id, small letters and digits."""


class MlflowTracker:
    """A run on the server of `MLFLOW_TRACKING_URI`, else in `mlflow.db` in the run's folder."""

    def __init__(
        self, project: str, experiment: str, directory: Path, config: Any, is_resumed: bool = False
    ) -> None:
        """Begin a run, or go on with it. Raises ConfigError for a server that does not answer."""
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        mlflow = load("mlflow", "mlflow")
        local = f"sqlite:///{directory.absolute() / 'mlflow.db'}"
        self.address = os.environ.get("MLFLOW_TRACKING_URI") or local
        self._metric = mlflow.entities.Metric
        self._error: type[Exception] = mlflow.exceptions.MlflowException
        self._waiting: list[Any] = []
        directory.mkdir(parents=True, exist_ok=True)
        kept = directory / "mlflow_run_id"
        try:
            self._client = mlflow.MlflowClient(self.address)
            if is_resumed and kept.exists():
                self.run_id = kept.read_text().strip()
                self._client.update_run(self.run_id, status="RUNNING")
                return
            found = self._client.get_experiment_by_name(project)
            number = found.experiment_id if found else self._client.create_experiment(project)
            self.run_id = self._client.create_run(number, run_name=experiment).info.run_id
            self._describe(mlflow, config or {})
        except self._error as error:
            expected = "a server or database that MLflow can use"
            got = f"{self.address} ({first_line(error)})"
            fix = "correct it, or unset it for a database in the run's folder"
            raise ConfigError(explain("MLFLOW_TRACKING_URI", got, expected, fix)) from error
        kept.write_text(self.run_id + "\n")

    def _describe(self, mlflow: ModuleType, config: Mapping[str, Any]) -> None:
        """The options of the run, by their dotted names."""
        given = [
            mlflow.entities.Param(FOREIGN.sub("_", name), str(value)[:MOST_CHARACTERS])
            for name, value in flattened(config)
        ]
        for first in range(0, len(given), MOST_PARAMETERS):
            self._client.log_batch(self.run_id, params=given[first : first + MOST_PARAMETERS])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record one step, after those that wait. Raises OSError where MLflow does not take it."""
        now = int(1000 * time.time())
        self._waiting += [
            self._metric(FOREIGN.sub("_", name), value, now, step)
            for name, value in metrics.items()
        ]
        try:
            while self._waiting:
                self._client.log_batch(self.run_id, metrics=self._waiting[:MOST_AT_ONCE])
                del self._waiting[:MOST_AT_ONCE]
        except self._error as error:
            raise OSError(errno.EIO, f"MLflow: {first_line(error)}", self.address) from error

    def rewind(self, step: int | None) -> None:
        """What was sent stays: of a step that comes again MLflow shows the last values."""

    def close(self) -> None:
        """End the run."""
        with contextlib.suppress(self._error):  # metrics.jsonl has it all
            self._client.set_terminated(self.run_id)


class SwanlabTracker:
    """A run of SwanLab; `SWANLAB_MODE`, where it is set, decides whether it is online.

    Else it is with an account (`swanlab login`, `SWANLAB_API_KEY`) and offline without. Its files
    are in `SWANLAB_LOG_DIR`, or `swanlog` in the run's folder.
    """

    def __init__(
        self, project: str, experiment: str, directory: Path, config: Any, is_resumed: bool = False
    ) -> None:
        swanlab = load("swanlab", "swanlab")
        given = os.environ.get("SWANLAB_LOG_DIR")
        self._folder = Path(given or directory / "swanlog").absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("SWANLAB_MODE") or ("online" if has_account() else "offline")
        letters = string.ascii_lowercase + string.digits
        new = "".join(secrets.choice(letters) for _ in range(SWANLAB_ID))
        self.run_id = kept_id(directory / "swanlab_run_id", is_resumed, new)
        self._swanlab = swanlab
        swanlab.init(
            project=project, name=experiment, config=config, log_dir=str(self._folder), mode=mode,
            id=self.run_id, resume="allow", reinit=True,
        )  # fmt: skip
        self.is_offline = mode == "offline"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record one step."""
        self._swanlab.log(dict(metrics), step=step)

    def rewind(self, step: int | None) -> None:
        """What was sent stays: of a step that comes again SwanLab keeps the first values."""

    def close(self) -> None:
        """End the run, and say how to upload what is on this disk only."""
        self._swanlab.finish()
        if self.is_offline:
            logger.info("swanlab: after `swanlab login`: swanlab sync %s/*", self._folder)


class TrackioTracker:
    """A run of Trackio, in `TRACKIO_DIR` or `trackio` in the run's folder; no server is started.

    `TRACKIO_SPACE_ID` sends it to a Space of the hub's, by Trackio itself.
    """

    def __init__(
        self, project: str, experiment: str, directory: Path, config: Any, is_resumed: bool = False
    ) -> None:
        folder = Path(os.environ.setdefault("TRACKIO_DIR", str((directory / "trackio").absolute())))
        folder.mkdir(parents=True, exist_ok=True)  # Trackio reads the variable when it is imported
        self._trackio = load("trackio", "trackio")
        self._trackio.init(
            project=project, name=experiment, config=config, embed=False,
            resume="allow" if is_resumed else "never",
        )  # fmt: skip

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record one step."""
        self._trackio.log(dict(metrics), step=step)

    def rewind(self, step: int | None) -> None:
        """What was sent stays: a step that comes again is there twice."""

    def close(self) -> None:
        """Write what is on its way."""
        self._trackio.finish()
        folder = load("trackio.utils", "trackio").TRACKIO_DIR
        logger.info("trackio: TRACKIO_DIR=%s trackio show", folder)


def has_account() -> bool:
    """Whether SwanLab has a key of the user's."""
    home = Path(os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab").expanduser()
    return bool(os.environ.get("SWANLAB_API_KEY")) or (home / ".netrc").exists()


def first_line(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
