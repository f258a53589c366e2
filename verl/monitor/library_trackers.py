"""Trackers for Weights & Biases, MLflow, SwanLab and Trackio, each on top of its own library.

Without a server address or account from the user, all of them write below the run's folder, so that
no data leaves the machine unasked. A resumed run continues the same run of the library, whose id is
stored in the run's folder. A tracker that cannot write raises OSError, which `Tracking` tolerates
if the run also writes `metrics.jsonl`.
"""

import contextlib
import errno
import importlib
import logging
import os
import re
import secrets
import shutil
import string
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx

from verl.config.known import flatten
from verl.errors import ConfigError, explain, first_line
from verl.proxies import client_settings

logger = logging.getLogger(__name__)

ID_FILE = "wandb_run_id"
CONNECT_S = 5.0
"""Seconds that wandb's server may take to answer before the run is logged offline."""
INIT_S = 30.0
"""Seconds that wandb may take to start a run."""
FINISH_S = 120.0
"""Seconds that the end of a run waits for uploads."""
MIN_FREE_BYTES = 1 << 20
"""Free disk space, more than one step needs, below which wandb could lose a step silently."""
MLFLOW_MAX_METRICS = 1000
"""Metrics that MLflow accepts in one call."""
MLFLOW_MAX_PARAMS, MLFLOW_MAX_CHARACTERS = 100, 6000
"""Options that MLflow accepts in one call, and characters of each value."""
MLFLOW_INVALID = re.compile(r"[^\w./ :-]")
"""Characters that MLflow does not allow in names."""
MLFLOW_TIMEOUTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Limits how long an unavailable server delays a step; MLflow's own defaults are minutes."""
SWANLAB_ID_LENGTH = 21
"""Characters of a SwanLab run's id: lower-case letters and digits."""


class Tracker:
    """A destination of metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of one step."""
        raise NotImplementedError

    def rewind(self, step: int | None) -> None:
        """Drop the steps after `step`, which will be logged again; None: all steps it has logged.

        A console's lines and a library's metrics stay. Of a step that is logged twice, wandb and
        SwanLab keep the first values, MLflow shows the last ones, Trackio both.
        """

    def close(self) -> None:
        """Flush and release everything."""


class WandbTracker(Tracker):
    """Logs to a run of wandb; if `WANDB_MODE` is set, it alone decides whether the run is online.

    Files are written to `WANDB_DIR` if that is set, as wandb users expect. An offline run has a
    part for each start; at the end, the command that uploads the parts is logged.
    """

    def __init__(
        self, project: str, experiment: str, directory: Path, config: Any, is_resumed: bool = False
    ) -> None:
        """Start a run below `directory`, or with `is_resumed` continue the one stored there."""
        wandb = load("wandb", "wandb")
        mode = os.environ.get("WANDB_MODE")
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = Path(os.environ.get("WANDB_DIR") or directory).absolute()
        self._directory.mkdir(parents=True, exist_ok=True)  # if it is missing, wandb uses /tmp
        self.run_id = run_id(directory, is_resumed)
        options: dict[str, Any] = {
            "project": project, "name": experiment, "dir": str(self._directory), "config": config,
            "id": self.run_id,
            "settings": wandb.Settings(init_timeout=INIT_S, finish_timeout=FINISH_S),
        }  # fmt: skip
        obstacle = None if mode else offline_reason(wandb)
        if obstacle is None:
            try:
                self._run = wandb.init(**options, resume=None if mode == "offline" else "allow")
            except wandb.errors.Error as error:
                if mode:
                    raise
                obstacle = first_line(error)
        if obstacle is not None:
            logger.warning("wandb: %s; metrics go to %s, to be uploaded later "
                           "(WANDB_MODE=online makes this an error)",
                           obstacle, self._directory / "wandb")  # fmt: skip
            self._run = wandb.init(**options, mode="offline")
        self.is_offline = bool(self._run.settings.mode == "offline")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record one step. Raises OSError if wandb's process would lose it silently."""
        if self.is_offline and shutil.disk_usage(self._directory).free < MIN_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._directory))
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """End the run and log how to upload offline parts."""
        self._run.finish()
        command = sync_command(self._directory, self.run_id)
        if command is not None:
            logger.info("wandb: on a machine with network and `wandb login`: %s", command)


def run_id(directory: Path, is_resumed: bool) -> str:
    """Return wandb's id of the run in `directory`; `WANDB_RUN_ID` overrides it if set."""
    chosen = os.environ.get("WANDB_RUN_ID")
    new = chosen or secrets.token_hex(4)
    return stored_id(directory / ID_FILE, is_resumed and chosen is None, new)


def stored_id(file: Path, is_resumed: bool, new: str) -> str:
    """Return the id stored in `file` by an earlier start, or store and return the `new` id."""
    if is_resumed and file.exists():
        return file.read_text().strip()
    file.write_text(new + "\n")
    return new


def offline_reason(wandb: ModuleType) -> str | None:
    """Return why wandb's server cannot be used now, or None; takes at most `CONNECT_S` seconds."""
    if not wandb.login(prompt=False, verify=False):
        return "no API key (`wandb login`, or WANDB_API_KEY)"
    server = str(wandb.setup().settings.base_url)
    try:
        httpx.get(server, timeout=CONNECT_S, **client_settings(server))
    except httpx.HTTPError as error:
        return f"{server} does not answer ({type(error).__name__})"
    return None


def sync_command(directory: Path, run_id: str) -> str | None:
    """Return the command that uploads the parts of a run not uploaded yet, or None."""
    parts = sorted((directory / "wandb").glob(f"offline-run-*-{run_id}"))
    unsynced = [str(part) for part in parts if not list(part.glob("*.synced"))]
    return f"wandb sync --id {run_id} {' '.join(unsynced)}" if unsynced else None


def load(module: str, package: str) -> ModuleType:
    """Import and return a tracker's module. Raises ConfigError if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fix = f"pip install {package}, or choose other backends with trainer.logger"
        expected = f"the package {package}"
        raise ConfigError(explain("trainer.logger", f"no {module}", expected, fix)) from error


class MlflowTracker(Tracker):
    """Logs to the server of `MLFLOW_TRACKING_URI`, else to `mlflow.db` in the run's folder."""

    def __init__(
        self, project: str, experiment: str, directory: Path, config: Any, is_resumed: bool = False
    ) -> None:
        """Start or continue a run. Raises ConfigError for a server that does not answer."""
        for name, value in MLFLOW_TIMEOUTS.items():
            os.environ.setdefault(name, value)
        mlflow = load("mlflow", "mlflow")
        local = f"sqlite:///{directory.absolute() / 'mlflow.db'}"
        self.address = os.environ.get("MLFLOW_TRACKING_URI") or local
        self._metric = mlflow.entities.Metric
        self._error: type[Exception] = mlflow.exceptions.MlflowException
        self._unsent: list[Any] = []
        directory.mkdir(parents=True, exist_ok=True)
        id_file = directory / "mlflow_run_id"
        try:
            self._client = mlflow.MlflowClient(self.address)
            if is_resumed and id_file.exists():
                self.run_id = id_file.read_text().strip()
                self._client.update_run(self.run_id, status="RUNNING")
                return
            found = self._client.get_experiment_by_name(project)
            number = found.experiment_id if found else self._client.create_experiment(project)
            self.run_id = self._client.create_run(number, run_name=experiment).info.run_id
            self._log_options(mlflow, config or {})
        except self._error as error:
            expected = "a server or database that MLflow can use"
            got = f"{self.address} ({first_line(error)})"
            fix = "correct it, or unset it for a database in the run's folder"
            raise ConfigError(explain("MLFLOW_TRACKING_URI", got, expected, fix)) from error
        id_file.write_text(self.run_id + "\n")

    def _log_options(self, mlflow: ModuleType, config: Mapping[str, Any]) -> None:
        """Log the options of the run as MLflow parameters, by their dotted names."""
        params = [
            mlflow.entities.Param(_mlflow_name(name), str(value)[:MLFLOW_MAX_CHARACTERS])
            for name, value in flatten(config)
        ]
        for first in range(0, len(params), MLFLOW_MAX_PARAMS):
            self._client.log_batch(self.run_id, params=params[first : first + MLFLOW_MAX_PARAMS])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record one step, after earlier unsent ones. Raises OSError if MLflow rejects it."""
        now_ms = int(1000 * time.time())
        self._unsent += [
            self._metric(_mlflow_name(name), value, now_ms, step) for name, value in metrics.items()
        ]
        try:
            while self._unsent:
                self._client.log_batch(self.run_id, metrics=self._unsent[:MLFLOW_MAX_METRICS])
                del self._unsent[:MLFLOW_MAX_METRICS]
        except self._error as error:
            raise OSError(errno.EIO, f"MLflow: {first_line(error)}", self.address) from error

    def close(self) -> None:
        """End the run."""
        with contextlib.suppress(self._error):  # metrics.jsonl is complete
            self._client.set_terminated(self.run_id)


def _mlflow_name(name: str) -> str:
    return MLFLOW_INVALID.sub("_", name)


class SwanlabTracker(Tracker):
    """Logs to a run of SwanLab; `SWANLAB_MODE`, if set, decides whether the run is online.

    Otherwise it is online if the user has an account (`swanlab login`, `SWANLAB_API_KEY`). Files
    are written to `SWANLAB_LOG_DIR`, or to `swanlog` in the run's folder.
    """

    def __init__(
        self, project: str, experiment: str, directory: Path, config: Any, is_resumed: bool = False
    ) -> None:
        swanlab = load("swanlab", "swanlab")
        self._folder = Path(os.environ.get("SWANLAB_LOG_DIR") or directory / "swanlog").absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("SWANLAB_MODE") or ("online" if has_swanlab_key() else "offline")
        letters = string.ascii_lowercase + string.digits
        new = "".join(secrets.choice(letters) for _ in range(SWANLAB_ID_LENGTH))
        self.run_id = stored_id(directory / "swanlab_run_id", is_resumed, new)
        self._swanlab, self.is_offline = swanlab, mode == "offline"
        swanlab.init(
            project=project, name=experiment, config=config, log_dir=str(self._folder), mode=mode,
            id=self.run_id, resume="allow", reinit=True,
        )  # fmt: skip

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        """End the run and log how to upload an offline one."""
        self._swanlab.finish()
        if self.is_offline:
            logger.info("swanlab: after `swanlab login`: swanlab sync %s/*", self._folder)


class TrackioTracker(Tracker):
    """Logs to a run of Trackio in `TRACKIO_DIR`, or `trackio` in the run's folder.

    No server is started. With `TRACKIO_SPACE_ID`, Trackio itself sends the run to a hub Space.
    """

    def __init__(
        self, project: str, experiment: str, directory: Path, config: Any, is_resumed: bool = False
    ) -> None:
        folder = Path(os.environ.setdefault("TRACKIO_DIR", str((directory / "trackio").absolute())))
        folder.mkdir(parents=True, exist_ok=True)  # Trackio reads TRACKIO_DIR at import
        self._trackio = load("trackio", "trackio")
        self._trackio.init(
            project=project, name=experiment, config=config, embed=False,
            resume="allow" if is_resumed else "never",
        )  # fmt: skip

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write unsent metrics, end the run and log how to view it."""
        self._trackio.finish()
        folder = load("trackio.utils", "trackio").TRACKIO_DIR
        logger.info("trackio: TRACKIO_DIR=%s trackio show", folder)


def has_swanlab_key() -> bool:
    """Return whether the user has an API key for SwanLab."""
    home = Path(os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab").expanduser()
    return bool(os.environ.get("SWANLAB_API_KEY")) or (home / ".netrc").exists()
