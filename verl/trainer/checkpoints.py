"""Checkpoints of a run: resuming from one, and saving when due."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from verl.checkpoint import folders
from verl.checkpoint.folders import RunState
from verl.checkpoint.saver import LOST_RANK_TIMEOUT_S, SavePlan, Saver
from verl.config import Config
from verl.trainer.hooks import Hook, joined_writer
from verl.training.checkpoint_files import checkpoint_errors, read_driver_random
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer

logger = logging.getLogger(__name__)


class Checkpoints(Hook):
    """Resumes a run, and saves the last finished step when that is due."""

    finished_state: RunState
    """State after the last finished step, which the next checkpoint stores."""

    def __init__(self, config: Config, saver: Saver, total_steps: int) -> None:
        self.config, self.saver = config, saver
        self.directory = Path(config.trainer.default_local_dir)
        self.is_read_only = config.trainer.val_only
        self.plan = SavePlan(config.trainer, total_steps)

    def on_start(self, trainer: RayPPOTrainer) -> None:
        """Resume from the checkpoint that `trainer.resume_mode` refers to, if any."""
        folders.clean_up(self.directory)
        mode = self.config.trainer.resume_mode
        folder = folders.resume_folder(mode, self.directory)
        if folder is not None:
            self._load(trainer, folder)
        if not self.is_read_only:
            # The trackers drop the steps that will be logged again.
            logs_step_again = trainer.step == 0 or trainer.unfinished is not None
            last_step = trainer.step - 1 if logs_step_again else trainer.step
            starts_over = folder is None and mode != "auto"
            trainer.logger.rewind(None if starts_over else last_step)
            folders.set_aside(self.directory, after=-1 if folder is None else trainer.step)

    def _load(self, trainer: RayPPOTrainer, folder: Path) -> None:
        trainer.ranks.load_checkpoint(folder)
        state = self.finished_state = RunState.read(folder)
        with checkpoint_errors(folder / folders.STATE_FILE):
            for part in trainer.parts:
                part.load_checkpoint(state, folder)
        trainer.step = state.step
        trainer.version = state.next_version - 1  # the weights are sent as the next one
        if state.pending is not None and not self.is_read_only:
            trainer.unfinished = dict(state.pending)
        read_driver_random(folder)
        self.saver.record_resume(folder)
        logger.info("resumed from %s", folder)

    def on_step_begin(self, trainer: RayPPOTrainer) -> None:
        """Note a background write that has ended."""
        self.saver.poll()

    def on_trained(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Remember the step: its updates are done, but not its validation and logging."""
        self.finished_state = RunState.of({**trainer.state_dict(), "pending": dict(metrics)})

    def on_step_end(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Remember the step as finished, and save it if a checkpoint is due."""
        self.finished_state = RunState.of(trainer.state_dict())
        if self.plan.is_due(trainer.step):
            self.save(trainer)

    def on_end(self, trainer: RayPPOTrainer) -> None:
        """Wait for the last checkpoint."""
        self.saver.finish_pending(is_final=True)

    def save(self, trainer: RayPPOTrainer, wait: bool = False) -> None:
        """Write an atomic checkpoint of the last finished step."""
        for watcher in self.saver.watchers:
            changes = watcher.on_saving(self.finished_state.step)
            self.finished_state = self.finished_state.changed(changes)
        state = self.finished_state
        self.plan.record_save()
        self.saver.save(state, wait, joined_writer(trainer.parts, state))

    @contextmanager
    def running(self, trainer: RayPPOTrainer) -> Iterator[None]:
        """Let no background write go on behind a run that failed."""
        self.finished_state = RunState.of(trainer.state_dict())
        try:
            yield
        except Exception:
            self.saver.close(LOST_RANK_TIMEOUT_S)
            raise


def hook(parts: Parts) -> Checkpoints:
    """Return the hook of a run."""
    return parts.checkpoints
