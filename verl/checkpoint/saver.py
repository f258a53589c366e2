"""When a run saves a checkpoint, and how it is written.

All ranks write their shards, in the background where memory allows; the checkpoint appears
when the last rank has finished. The driver adds a `RunState`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verl.checkpoint import folders
from verl.checkpoint.folders import PendingCheckpoint, RunState, discard
from verl.config import TrainerConfig
from verl.errors import SaveError, UserError
from verl.training.checkpoint_files import write_driver_random

logger = logging.getLogger(__name__)

LOST_RANK_TIMEOUT_S = 10.0
"""Seconds to wait for a background write when a rank has died: it ends soon or never."""
MAX_FAILURES = 2
"""Number of failed checkpoints in a row that ends the run."""
ExtraWriter = Callable[[Path], None]
"""Writes additional files into a checkpoint's folder."""


class Ranks(Protocol):
    """The methods of the training ranks that saving uses; see `verl.trainer.ranks.TrainerRanks`."""

    def save_checkpoint(self, directory: Path) -> None: ...
    def can_copy_checkpoint(self) -> bool: ...
    def start_checkpoint(self, directory: Path) -> None: ...
    def finish_checkpoint(self) -> None: ...


class Watcher(Protocol):
    """What follows the checkpoints of a run, to say which must be kept."""

    @property
    def protected_steps(self) -> set[int]:
        """Steps whose checkpoints must not be deleted, whatever their age."""
        return set()

    def on_saving(self, step: int) -> Mapping[str, Any]:
        """Called before a checkpoint is written; returns the entries of its state to replace."""
        return {}

    def on_saved(self, step: int) -> None:
        """Called with the step of a checkpoint that is complete."""
        return

    def drop_pending(self, step: int) -> None:
        """Called with the step of a checkpoint that was deleted or could not be written."""
        return


def is_due(frequency: int, step: int, total_steps: int) -> bool:
    """Whether to act: every `frequency` steps and at the end; 0: never, < 0: only at the end."""
    if step == total_steps:
        return frequency != 0
    return frequency > 0 and step % frequency == 0


@dataclass
class SavePlan:
    """Decides whether a checkpoint is due: by steps, and by minutes since the last one."""

    config: TrainerConfig
    total_steps: int
    clock: Callable[[], float] = time.monotonic
    _saved_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._saved_at = self.clock()

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`, by `save_freq` or `save_minutes`."""
        if is_due(self.config.save_freq, step, self.total_steps):
            return True
        minutes = self.config.save_minutes
        if minutes is None or step >= self.total_steps:
            return False
        return self.clock() - self._saved_at >= 60 * minutes

    def record_save(self) -> None:
        """Restart the count of minutes: a checkpoint is being saved now."""
        self._saved_at = self.clock()


@dataclass
class Saver:
    """Writes the checkpoints of one run below `root`."""

    root: Path
    ranks: Ranks
    record: Mapping[str, Any] = field(default_factory=dict)
    """What each checkpoint stores of the run beside its state, by name; JSON."""
    watchers: list[Watcher] = field(default_factory=list)
    last_step: int | None = None
    """Step of the newest checkpoint that was written or resumed from."""
    longest_s: float = 0.0
    """Seconds that the slowest checkpoint took."""
    _pending: tuple[PendingCheckpoint, Future[Path]] | None = field(init=False, default=None)
    """The checkpoint that is being written in the background."""
    _num_failures: int = field(init=False, default=0)

    def save(
        self, state: RunState, wait: bool = False, write_extra: ExtraWriter | None = None
    ) -> None:
        """Write the checkpoint of `state`, once the previous one is complete.

        Waits until it is written with `wait`, or if a copy does not fit into memory. Raises
        SaveError if writing failed twice in a row or, with `wait`, once.
        """
        self.finish_pending()
        pending: PendingCheckpoint | None = None
        try:
            pending = folders.begin(self.root, state.step)
            folders.write_state(pending.folder, {**asdict(state), **self.record})
            write_driver_random(pending.folder)
            if not wait and self._can_copy():
                self.ranks.start_checkpoint(pending.folder)
                written = _run_in_background(lambda: self._finish(pending, write_extra))
                self._pending = pending, written
            else:
                self.ranks.save_checkpoint(pending.folder)
                self._handle_success(self._publish(pending, write_extra))
        except (OSError, SaveError) as error:
            self._handle_failure(state.step, pending, error, is_final=wait)
        except BaseException:
            if pending is not None and self._pending is None:
                discard(pending)
            raise

    def _can_copy(self) -> bool:
        """Whether the hosts have enough memory for copies of the shards; logs a warning if not."""
        if self.ranks.can_copy_checkpoint():
            return True
        logger.warning("host memory is too small for a copy of the shards: training waits for the "
                       "checkpoint to be written")  # fmt: skip
        return False

    def record_resume(self, folder: Path) -> None:
        """Note the resumed checkpoint; if it is in the run's folder, it need not be saved again."""
        if folder.resolve().parent == self.root.resolve():
            self.last_step = folders.step_of(folder)

    def poll(self) -> None:
        """Finish a background write that has ended; returns at once if it has not."""
        if self._pending is not None and self._pending[1].done():
            self.finish_pending()

    def finish_pending(self, is_final: bool = False, timeout_s: float | None = None) -> None:
        """Wait for the background write, if there is one, up to `timeout_s` seconds.

        Raises SaveError if it failed, for the second time in a row or with `is_final`.
        """
        if self._pending is None:
            return
        pending, written = self._pending
        self._pending = None
        if not futures.wait([written], timeout_s).done:
            logger.error("the checkpoint of step %d was not completed within %g s; the next start "
                         "removes the unfinished files", pending.step, timeout_s)  # fmt: skip
            return
        try:
            self._handle_success(written.result())
        except (OSError, SaveError) as error:
            self._handle_failure(pending.step, pending, error, is_final)
        except BaseException:
            discard(pending)
            raise

    def _finish(self, pending: PendingCheckpoint, write_extra: ExtraWriter | None) -> Path:
        self.ranks.finish_checkpoint()
        return self._publish(pending, write_extra)

    def _publish(self, pending: PendingCheckpoint, write_extra: ExtraWriter | None) -> Path:
        if write_extra is not None:
            write_extra(pending.folder)
        folder = folders.publish(pending)
        self.longest_s = max(self.longest_s, time.monotonic() - pending.started)
        return folder

    def _handle_success(self, folder: Path) -> None:
        self._num_failures = 0
        self.last_step = folders.step_of(folder)
        logger.info("saved %s", folder)
        for watcher in self.watchers:
            watcher.on_saved(self.last_step)

    def _handle_failure(
        self, step: int, pending: PendingCheckpoint | None, error: Exception, is_final: bool
    ) -> None:
        """Log that a checkpoint could not be written; raises SaveError if this ends the run."""
        if pending is not None:
            discard(pending)
        self.tell_lost(step)
        self._num_failures += 1
        last = folders.latest(self.root)
        previous = f"the last one is {last}" if last else "there is none before it"
        text = (
            f"the checkpoint of step {step} could not be written ({error}); {previous}; make sure "
            f"that {self.root} is writable and its disk has enough space"
        )
        if is_final or self._num_failures >= MAX_FAILURES:
            raise SaveError(text) from error
        logger.error("%s; the run continues", text)

    def tell_lost(self, step: int) -> None:
        """Tell who watches that there is no checkpoint of `step`."""
        for watcher in self.watchers:
            watcher.drop_pending(step)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the background write and only log its failure, as the run ends anyway."""
        try:
            self.finish_pending(is_final=True, timeout_s=timeout_s)
        except UserError as error:
            logger.error("%s", error)


def _run_in_background(work: Callable[[], Path]) -> Future[Path]:
    """Run `work` in a daemon thread, which, unlike an executor's, lets the process exit."""
    done: Future[Path] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised again by `Future.result`)
            done.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return done
