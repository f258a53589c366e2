"""Weights & Biases, MLflow, SwanLab and Trackio as trackers, each by its own library.

Without an address or an account of the user's, all of them write below the run's folder: nothing
leaves the machine unasked. A run that is resumed goes on in the same run of theirs, whose id is
kept in its folder. What a library cannot take is an OSError, which `Tracking` spares a run that has
`metrics.jsonl`.
"""

from __future__ import annotations

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

logger = logging.getLogger(__name__)

ID_FILE = "wandb_run_id"
PROBE_S = 5.0
"""How long wandb's server may take to answer before the run goes on without it."""
INIT_S = 30.0
"""How long wandb may take to begin a run."""
FINISH_S = 120.0
"""How long the end of a run waits for uploads."""
ROOM = 1 << 20
"""Bytes of its disk, more than those of a step, without which wandb might lose one."""
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


class Tracker:
    """One place where metrics go."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record one step."""
        raise NotImplementedError

    def rewind(self, step: int | None) -> None:
        """Forget the steps after `step`, which come again; None forgets all of this tracker's own.

        What can no longer be changed is left as it is: lines on a console, and what a library was
        given. Of a step that comes again wandb and SwanLab keep the first values, MLflow shows the
        last, Trackio both.
        """

    def close(self) -> None:
        """Flush and let go."""


class WandbTracker(Tracker):
    """One run of wandb; `WANDB_MODE`, where it is set, decides alone whether it is online.

    Its files are in `WANDB_DIR` where that is set, as wandb's own users expect. Offline parts, one
    for each time the run was started, are named at the end with the command that uploads them.
    """

    def __init__(
        self, project: str, experiment: str, directory: Path, config: Any, is_resumed: bool = False
    ) -> None:
        """Begin a run below `directory`, or with `is_resumed` go on with the one that is there."""
        wandb, mode = load("wandb", "wandb"), os.environ.get("WANDB_MODE")
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = Path(os.environ.get("WANDB_DIR") or directory).absolute()
        self._directory.mkdir(parents=True, exist_ok=True)  # wandb leaves for /tmp where it lacks
        self.run_id = run_id(directory, is_resumed)
        options: dict[str, Any] = {
            "project": project, "name": experiment, "dir": str(self._directory), "config": config,
            "id": self.run_id,
            "settings": wandb.Settings(init_timeout=INIT_S, finish_timeout=FINISH_S),
        }  # fmt: skip
        obstacle = None if mode else why_offline(wandb)
        if obstacle is None:
            try:
                resume = None if mode == "offline" else "allow"
                self._run = wandb.init(**options, resume=resume)
            except wandb.errors.Error as error:
                if mode:
                    raise
                obstacle = first_line(error)
        if obstacle is not None:
            logger.warning("wandb: %s; metrics go to %s, to be uploaded later "
                           "(WANDB_MODE=online insists)",
                           obstacle, self._directory / "wandb")  # fmt: skip
            self._run = wandb.init(**options, mode="offline")
        self.is_offline = bool(self._run.settings.mode == "offline")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record one step. Raises OSError where wandb's process would lose it and tell nobody."""
        if self.is_offline and shutil.disk_usage(self._directory).free < ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._directory))
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """End the run, and say how to upload what is on this disk only."""
        self._run.finish()
        command = sync_command(self._directory, self.run_id)
        if command is not None:
            logger.info("wandb: on a machine with network and `wandb login`: %s", command)


def run_id(directory: Path, is_resumed: bool) -> str:
    """wandb's id of the run in `directory`; `WANDB_RUN_ID` decides where it is set."""
    given, file = os.environ.get("WANDB_RUN_ID"), directory / ID_FILE
    return kept_id(file, is_resumed and given is None, given or secrets.token_hex(4))


def kept_id(file: Path, is_resumed: bool, new: str) -> str:
    """The id in a run's folder; the `new` one, kept there, where the run begins anew."""
    if is_resumed and file.exists():
        return file.read_text().strip()
    file.write_text(new + "\n")
    return new


def why_offline(wandb: ModuleType) -> str | None:
    """What keeps a run from being sent to wandb's server now, or None; asks for seconds at most."""
    if not wandb.login(prompt=False, verify=False):
        return "no API key (`wandb login`, or WANDB_API_KEY)"
    server = str(wandb.setup().settings.base_url)
    try:
        httpx.get(server, timeout=PROBE_S)
    except httpx.HTTPError as error:
        return f"{server} does not answer ({type(error).__name__})"
    return None


def sync_command(directory: Path, run_id: str) -> str | None:
    """The command that uploads the parts of a run that still wait for it, or None."""
    parts = sorted((directory / "wandb").glob(f"offline-run-*-{run_id}"))
    waiting = [str(part) for part in parts if not list(part.glob("*.synced"))]
    return f"wandb sync --id {run_id} {' '.join(waiting)}" if waiting else None


def load(module: str, package: str) -> ModuleType:
    """Import a tracker's module when it is asked for; raises ConfigError where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fix = f"pip install {package}, or choose other backends with trainer.logger"
        expected = f"the package {package}"
        raise ConfigError(explain("trainer.logger", f"no {module}", expected, fix)) from error


class MlflowTracker(Tracker):
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
            for name, value in flatten(config)
        ]
        for first in range(0, len(given), MOST_PARAMETERS):
            self._client.log_batch(self.run_id, params=given[first : first + MOST_PARAMETERS])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record one step, after those that wait. Raises OSError where MLflow does not take it."""
        now, named = int(1000 * time.time()), metrics.items()
        self._waiting += [self._metric(FOREIGN.sub("_", k), value, now, step) for k, value in named]
        try:
            while self._waiting:
                self._client.log_batch(self.run_id, metrics=self._waiting[:MOST_AT_ONCE])
                del self._waiting[:MOST_AT_ONCE]
        except self._error as error:
            raise OSError(errno.EIO, f"MLflow: {first_line(error)}", self.address) from error

    def close(self) -> None:
        """End the run."""
        with contextlib.suppress(self._error):  # metrics.jsonl has it all
            self._client.set_terminated(self.run_id)


class SwanlabTracker(Tracker):
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

    def close(self) -> None:
        """End the run, and say how to upload what is on this disk only."""
        self._swanlab.finish()
        if self.is_offline:
            logger.info("swanlab: after `swanlab login`: swanlab sync %s/*", self._folder)


class TrackioTracker(Tracker):
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

    def close(self) -> None:
        """Write what is on its way."""
        self._trackio.finish()
        folder = load("trackio.utils", "trackio").TRACKIO_DIR
        logger.info("trackio: TRACKIO_DIR=%s trackio show", folder)


def has_account() -> bool:
    """Whether SwanLab has a key of the user's."""
    home = Path(os.environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab").expanduser()
    return bool(os.environ.get("SWANLAB_API_KEY")) or (home / ".netrc").exists()
