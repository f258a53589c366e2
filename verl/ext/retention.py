"""Deletes the checkpoints that no option asks to keep (`trainer.keep_last`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint import folders
from verl.checkpoint.folders import RunState
from verl.checkpoint.saver import Saver, Watcher
from verl.errors import ModelError

if TYPE_CHECKING:
    from verl.trainer.build import Parts

logger = logging.getLogger(__name__)


@dataclass
class Retention(Watcher):
    """Deletes older checkpoints each time that one is complete; see `checkpoints_to_keep`."""

    saver: Saver
    keep_last: int
    keep_best: int

    def on_saved(self, step: int) -> None:
        """Delete what is no longer needed."""
        saver, complete = self.saver, folders.all_complete(self.saver.root)
        protected = {step for watcher in saver.watchers for step in watcher.protected_steps}
        kept = checkpoints_to_keep(complete, self.keep_last, self.keep_best, protected)
        for step_dir in complete:
            if step_dir not in kept:
                logger.info("%s is no longer needed: removed", step_dir)
                saver.tell_lost(folders.step_of(step_dir))
                try:
                    folders.remove(step_dir)
                except OSError as error:  # must not count as a failed write of the new checkpoint
                    logger.warning("%s could not be removed: %s", step_dir, error)


def hook(parts: Parts) -> None:
    """Have a run's saver followed, if an option asks for it."""
    trainer = parts.config.trainer
    if trainer.keep_last is not None:
        retention = Retention(parts.saver, trainer.keep_last, trainer.keep_best)
        parts.saver.watchers.append(retention)


def checkpoints_to_keep(
    complete: Sequence[Path], keep_last: int, keep_best: int, protected: set[int]
) -> set[Path]:
    """Return the checkpoints among `complete` (oldest first) that must not be deleted.

    These are the newest `keep_last` (at least one), the `keep_best` with the highest scores, and
    those of the `protected` steps. Scores rank only the checkpoints that were validated as the
    newest validated one was: by the same metric, on the same rows.
    """
    scores = {path: _score(path) for path in complete}
    validations = {path: _validation(path) for path in complete if scores[path] is not None}
    present = list(validations.values())[-1:]
    comparable = [path for path, validation in validations.items() if validation in present]
    best = sorted(comparable, key=lambda path: (scores[path], folders.step_of(path)), reverse=True)
    needed = [path for path in complete if folders.step_of(path) in protected]
    return {*complete[-max(keep_last, 1) :], *best[:keep_best], *needed}


def _score(step_dir: Path) -> float | None:
    """Return the validation score of a checkpoint; None if it has none or its state is damaged."""
    try:
        return RunState.read(step_dir).score
    except ModelError as error:
        logger.warning("%s", error)
        return None


def _validation(step_dir: Path) -> tuple[Any, ...]:
    """Return what makes a checkpoint's score comparable; the parts that it lacks are None."""
    state = folders.read_state(step_dir)
    config, fingerprints = state.get("config") or {}, state.get("fingerprints") or {}
    metric = config.get("trainer", {}).get("best_metric")
    num_rows = config.get("data", {}).get("val_data_num")
    return metric, fingerprints.get("validation"), num_rows
