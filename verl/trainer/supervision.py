"""Restarts of a run that lost a process for good: it goes on from its newest checkpoint.

That is the newest that this command wrote, whatever `trainer.resume_mode` says; where it wrote none
yet, the run starts again as the command did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from verl.checkpoint import folders
from verl.config import Config
from verl.errors import RankLost, ReplicaLost
from verl.single_controller.restarts import Restarts

Attempt = Callable[[Config], None]
"""Runs a configuration to its end, and takes everything down however that comes."""


def supervise(attempt: Attempt, config: Config, restarts: Restarts) -> None:
    """Repeat `attempt` until it ends without having lost a rank, or a replica beyond repair.

    Raises the last loss when `restarts` are used up; whatever else ends a run ends it here too.
    """
    root = Path(config.trainer.default_local_dir)
    before = written(root)
    while True:
        try:
            return attempt(config)
        except (RankLost, ReplicaLost) as error:
            newest = newest_since(before, root)
            began = "the beginning" if config.trainer.resume_mode == "disable" else "where it began"
            restarts.spend_on_run(error, began if newest is None else str(newest))
            if newest is not None:
                config = resuming(config, newest)


def written(root: Path) -> Mapping[Path, int]:
    """The complete checkpoints below `root`, each with the time its marker was written, in ns."""
    found = folders.all_complete(root)
    return {folder: (folder / folders.MARKER).stat().st_mtime_ns for folder in found}


def newest_since(before: Mapping[Path, int], root: Path) -> Path | None:
    """The checkpoint of the highest step that was written since `before` was taken."""
    found = [folder for folder, when in written(root).items() if before.get(folder) != when]
    return max(found, key=folders.step_of, default=None)


def resuming(config: Config, folder: Path) -> Config:
    """The same run from a checkpoint."""
    return replace(config, trainer=replace(config.trainer, resume_mode=str(folder)))
