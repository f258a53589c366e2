"""When a run saves a checkpoint, how it is written, and which checkpoints are kept.

All ranks write their part, in the background with `trainer.async_save`; the checkpoint appears
when the last of them has finished. The driver's part of it is one `RunState`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verl.checkpoint import folders
from verl.checkpoint.folders import Part, RunState, abandon, write_driver_random
from verl.config import TrainerConfig
from verl.errors import ModelError, SaveError, UserError

logger = logging.getLogger(__name__)

LOST_RANK_S = 10.0
"""Time for a background write to end when a rank has died: it is nearly done, or never will be."""
SLOW_DISK = 200e6
"""Bytes a second that a checkpoint is expected to be written with, before one was timed."""
MAX_FAILURES = 2
"""Checkpoints in a row that may not be written before the run ends."""


class Ranks(Protocol):
    """What saving needs of the training ranks; see `verl.trainer.ranks.TrainerRanks`."""

    def save_checkpoint(self, directory: Path) -> None: ...
    def checkpoint_bytes(self) -> int: ...
    def can_copy_checkpoint(self) -> bool: ...
    def start_checkpoint(self, directory: Path) -> None: ...
    def finish_checkpoint(self) -> None: ...


def is_due(frequency: int, step: int, total_steps: int) -> bool:
    """Whether something of every `frequency` steps is due; at the end it is unless that is 0."""
    if step == total_steps:
        return frequency != 0
    return frequency > 0 and step % frequency == 0


@dataclass
class SavePlan:
    """Whether a checkpoint is due: by steps, and by minutes since the last one."""

    config: TrainerConfig
    total_steps: int
    clock: Callable[[], float] = time.monotonic
    _saved_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._saved_at = self.clock()

    def is_due(self, step: int) -> bool:
        """Every `save_freq` steps, after `save_minutes`, and at the end unless `save_freq` is 0."""
        minutes = self.config.save_minutes
        by_time = minutes is not None and self.clock() - self._saved_at >= 60 * minutes
        by_time = by_time and step < self.total_steps
        return by_time or is_due(self.config.save_freq, step, self.total_steps)

    def saved(self) -> None:
        """A checkpoint was begun now."""
        self._saved_at = self.clock()


@dataclass
class Saver:
    """Writes and keeps the checkpoints of one run below `root`."""

    config: TrainerConfig
    root: Path
    ranks: Ranks
    identity: Mapping[str, Any] = field(default_factory=dict)
    """Configuration and fingerprints, which a resume is compared with; JSON."""
    protected: Callable[[], set[int]] = set
    """Steps whose checkpoints are needed, whatever their age."""
    lost: Callable[[int], None] = lambda step: None
    """Called with the step of a checkpoint that was deleted, or could not be written."""
    last_step: int | None = None
    """Step of the newest checkpoint that was written or resumed from."""
    longest_s: float = 0.0
    _pending: tuple[Part, Future[Path]] | None = field(init=False, default=None)
    """What is being written in the background."""
    _num_failures: int = field(init=False, default=0)

    def save(
        self, state: RunState, wait: bool = False, beside: Callable[[Path], None] | None = None
    ) -> None:
        """Write the checkpoint of a state; with `wait`, or without `async_save`, to its end.

        `beside` writes something else into its folder, also in the background. The one before is
        waited for. Raises SaveError when writing failed twice in a row, or at once with `wait`.
        """
        self.settle()
        part: Part | None = None
        try:
            part = folders.begin(self.root, state.step)
            folders.write_state(part.folder, {**asdict(state), **self.identity})
            write_driver_random(part.folder)
            if self.config.async_save and not wait and self._can_copy():
                self.ranks.start_checkpoint(part.folder)
                self._pending = part, _in_background(lambda: self._finish(part, beside))
            else:
                self.ranks.save_checkpoint(part.folder)
                self._written(self._publish(part, beside))
        except (OSError, SaveError) as error:
            self._failed(state.step, part, error, is_final=wait)
        except BaseException:
            if part is not None and self._pending is None:
                abandon(part)
            raise

    def expected_s(self) -> float:
        """Seconds that a checkpoint may take: the longest so far, or by its size."""
        return self.longest_s or self.ranks.checkpoint_bytes() / SLOW_DISK

    def _can_copy(self) -> bool:
        """Whether the hosts have room for copies; where they have not, the log says so."""
        if self.ranks.can_copy_checkpoint():
            return True
        logger.warning("host memory has no room for a copy of the shards: training waits for the "
                       "checkpoint to be written")  # fmt: skip
        return False

    def resumed(self, folder: Path) -> None:
        """The run goes on from this checkpoint; one of its own need not be written again."""
        if folder.resolve().parent == self.root.resolve():
            self.last_step = folders.step_of(folder)

    def poll(self) -> None:
        """Finish a background write that has ended; returns at once while one has not."""
        if self._pending is not None and self._pending[1].done():
            self.settle()

    def settle(self, is_final: bool = False, patience_s: float | None = None) -> None:
        """Wait for the background write, if there is one; at most `patience_s` seconds.

        Raises SaveError when it failed for the second time in a row, or is the last.
        """
        if self._pending is None:
            return
        (part, written), self._pending = self._pending, None
        if not futures.wait([written], patience_s).done:
            logger.error("the checkpoint of step %d was not written to its end in %g s; the next "
                         "start removes what there is of it", part.step, patience_s)  # fmt: skip
            return
        try:
            self._written(written.result())
        except (OSError, SaveError) as error:
            self._failed(part.step, part, error, is_final)
        except BaseException:
            abandon(part)
            raise

    def _finish(self, part: Part, beside: Callable[[Path], None] | None) -> Path:
        self.ranks.finish_checkpoint()
        return self._publish(part, beside)

    def _publish(self, part: Part, beside: Callable[[Path], None] | None) -> Path:
        if beside is not None:
            beside(part.folder)
        folder = folders.publish(part)
        self.longest_s = max(self.longest_s, time.monotonic() - part.began)
        return folder

    def _written(self, folder: Path) -> None:
        self._num_failures = 0
        self.last_step = folders.step_of(folder)
        logger.info("saved %s", folder)
        self.prune()

    def _failed(self, step: int, part: Part | None, error: Exception, is_final: bool) -> None:
        """Report a checkpoint that was not written; raises SaveError when it is one too many."""
        if part is not None:
            abandon(part)
        self.lost(step)
        self._num_failures += 1
        last = folders.latest(self.root)
        text = (
            f"the checkpoint of step {step} could not be written ({error}); "
            f"{f'the last one is {last}' if last else 'there is none before it'}; see that "
            f"{self.root} is writable and its disk has room"
        )
        if is_final or self._num_failures >= MAX_FAILURES:
            raise SaveError(text) from error
        logger.error("%s; the run goes on", text)

    def prune(self) -> None:
        """Delete the checkpoints that no option asks to keep; see `to_keep`."""
        if self.config.keep_last is None:
            return
        found = folders.all_complete(self.root)
        kept = to_keep(found, self.config.keep_last, self.config.keep_best, self.protected())
        for step_dir in found:
            if step_dir not in kept:
                logger.info("%s is no longer needed: removed", step_dir)
                self.lost(folders.step_of(step_dir))
                try:
                    folders.remove(step_dir)
                except OSError as error:  # no fault of the checkpoint that was just written
                    logger.warning("%s could not be removed: %s", step_dir, error)

    def close(self, patience_s: float | None = None) -> None:
        """Let the background write end; what fails in it is logged, since the run ends for more."""
        try:
            self.settle(is_final=True, patience_s=patience_s)
        except UserError as error:
            logger.error("%s", error)


def to_keep(
    found: Sequence[Path], keep_last: int, keep_best: int, protected: set[int]
) -> set[Path]:
    """Those of the complete checkpoints `found` (oldest first) that are not to be deleted.

    They are the newest `keep_last` and in any case the newest one, the `keep_best` of the highest
    score, the newest healthy one, and the protected steps.
    """
    scores = {path: _score(path) for path in found}
    judged = [path for path in found if scores[path] is not None]
    best = sorted(judged, key=lambda path: (scores[path], folders.step_of(path)), reverse=True)
    healthy = [path for path in found if (path / folders.HEALTHY).exists()]
    needed = [path for path in found if folders.step_of(path) in protected]
    return {*found[-max(keep_last, 1) :], *healthy[-1:], *best[:keep_best], *needed}


def _score(step_dir: Path) -> float | None:
    """What was measured at a checkpoint; None also where its state is damaged: it ends no run."""
    try:
        return RunState.read(step_dir).score
    except ModelError as error:
        logger.warning("%s", error)
        return None


def _in_background(work: Callable[[], Path]) -> Future[Path]:
    """Run `work` in a thread that does not hold the process back from ending."""
    done: Future[Path] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised again where the result is asked for)
            done.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return done
