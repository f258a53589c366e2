"""Saves the last finished step of a run that ends early, and says how to continue.

A run ends early because it was asked to (`verl.ext.stopping`), or because tools, a user's code or
the disk failed while the ranks are well.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from verl.checkpoint import folders
from verl.checkpoint.saver import LOST_RANK_TIMEOUT_S
from verl.errors import (
    CollapseError,
    Interrupted,
    MismatchError,
    PluginError,
    RankLost,
    ReplicaLost,
    ResourceError,
    SaveError,
    ToolOutage,
    ToolRefused,
)
from verl.files import is_file_error
from verl.trainer.checkpoints import Checkpoints
from verl.trainer.hooks import Hook

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer

logger = logging.getLogger(__name__)


class EarlyEnd(Hook):
    """Handles the errors that end a run, before the run's checkpoints close."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        """`checkpoints` know the last finished step, and save it."""
        self.checkpoints, self.saver = checkpoints, checkpoints.saver

    @contextmanager
    def running(self, trainer: RayPPOTrainer) -> Iterator[None]:
        """Save the last finished step if the run is interrupted, or tools, code or disk fail.

        The error that is raised says how to continue.
        """
        try:
            yield
        except KeyboardInterrupt:
            if not (reason := stop_reason(trainer)):
                raise
            raise Interrupted(self._save(trainer, reason)) from None
        except (Interrupted, ToolOutage, ToolRefused, PluginError) as error:
            raise type(error)(self._save(trainer, str(error))) from error
        except MismatchError as error:  # saving would need the engines, or keep a wrong policy
            self.saver.close()
            raise MismatchError(self._with_resume_hint(str(error))) from error
        except ResourceError as error:  # no space for transferred weights: all ranks are alive
            if trainer.step == self.checkpoints.finished_state.step:
                raise Interrupted(self._save(trainer, str(error))) from error
            # The ranks' weights are already one step ahead of the finished state.
            self.saver.close()
            raise Interrupted(self._with_resume_hint(str(error))) from error
        except CollapseError:
            self.saver.close()
            raise
        except OSError as error:
            if not is_file_error(error):
                raise
            reason = f"the run could not write its files: {error}"
            raise Interrupted(self._save(trainer, reason)) from error
        except (RankLost, ReplicaLost) as error:
            self.saver.close(LOST_RANK_TIMEOUT_S)
            if not (reason := stop_reason(trainer)):
                raise
            # Slurm signals all processes of a job, so lost processes are part of the stop.
            raise Interrupted(self._with_resume_hint(reason)) from error

    def _save(self, trainer: RayPPOTrainer, reason: str) -> str:
        """Save the last finished step if needed; returns the reason and how to continue."""
        finished = self.checkpoints.finished_state
        if finished.step == 0 or self.checkpoints.is_read_only:
            return f"{reason}; nothing was learned yet: start again with the same command"
        try:
            self.saver.finish_pending()
            if self.saver.last_step != finished.step or finished.pending is not None:
                self.checkpoints.save(trainer, wait=True)
        except (RankLost, SaveError) as error:
            self.saver.close(LOST_RANK_TIMEOUT_S)
            logger.error("the last finished step could not be saved: %s", error)
        return self._with_resume_hint(reason)

    def _with_resume_hint(self, reason: str) -> str:
        """Return the reason for stopping, with the last checkpoint and how to continue from it."""
        last = folders.latest(self.checkpoints.directory)
        if last is None:
            return f"{reason}; there is no checkpoint: start again with the same command"
        hint = "continue with the same command and trainer.resume_mode=auto"
        return f"{reason}; saved {last}: {hint}"


def stop_reason(trainer: RayPPOTrainer) -> str:
    """Return the first reason of a hook why the run must stop; empty if there is none."""
    return next(filter(None, (hook.stop_reason() for hook in trainer.hooks)), "")


def hook(parts: Parts) -> EarlyEnd:
    """Return the hook of a run."""
    return EarlyEnd(parts.checkpoints)
