"""Weights & Biases as one of the trackers: online where possible, else into the run's folder.

A run keeps its id in its folder, so that what resumes it goes on in the same run of wandb. Offline
parts, one for each time the run was started, are named at the end with the command that uploads
them.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx

from verl.errors import ConfigError, explain

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


class WandbTracker:
    """One run of wandb; `WANDB_MODE`, where it is set, decides alone whether it is online.

    Its files are in `WANDB_DIR` where that is set, as wandb's own users expect.
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
            "project": project,
            "name": experiment,
            "dir": str(self._directory),
            "config": config,
            "id": self.run_id,
            "settings": wandb.Settings(init_timeout=INIT_S, finish_timeout=FINISH_S),
        }
        obstacle = None if mode else why_offline(wandb)
        if obstacle is None:
            try:
                resume = None if mode == "offline" else "allow"
                self._run = wandb.init(**options, resume=resume)
            except wandb.errors.Error as error:
                if mode:
                    raise
                obstacle = str(error).splitlines()[0]
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

    def rewind(self, step: int | None) -> None:
        """What was sent stays: of a step that comes again wandb keeps the first values."""

    def close(self) -> None:
        """End the run, and say how to upload what is on this disk only."""
        self._run.finish()
        command = sync_command(self._directory, self.run_id)
        if command is not None:
            logger.info("wandb: on a machine with network and `wandb login`: %s", command)


def run_id(directory: Path, is_resumed: bool) -> str:
    """The id of the run in `directory`; a new one where the run begins anew.

    `WANDB_RUN_ID` decides where it is set.
    """
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
