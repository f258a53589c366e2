"""`rollout.max_staleness`: trajectories of later steps are sampled while earlier ones train.

Batches are started and used in the order of the data, and at most `max_staleness` batches wait
behind the one in use. So the batch of step t was started at step t - max_staleness or later, and
was sampled by the weights of that step or newer ones, which bounds its staleness.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checkpoint import folders
from verl.checkpoint.folders import RunState
from verl.config import Config
from verl.data.sampler import starts_over
from verl.ext import ahead_files, replay
from verl.monitor.performance import Timings
from verl.rollout.rollouts import RolloutRequest
from verl.trainer.collect import Measure, RolloutCollector, Samples
from verl.trainer.hooks import FileWriter
from verl.types import Metrics, Trajectory, TrajectoryKey

if TYPE_CHECKING:
    from verl.trainer.build import Parts

FinishedTrajectories = Callable[[], Mapping[TrajectoryKey, Trajectory]]
"""Waits for finished trajectories that were asked for; callable in any thread."""


@dataclass
class PromptBatch:
    """Prompts that are sampled together; groups and seeds are derived from `step` and `first`.

    The batch is planned for `step`, and its first prompt is number `first` of that step's prompts.
    """

    step: int
    first: int
    rows: list[int]
    request: RolloutRequest | None = None
    """The request for the trajectories, once it is started."""


@dataclass
class AheadCollector(RolloutCollector):
    """Samples some steps ahead of time; a batch may be planned for a later step than it is used in.

    A checkpoint keeps the batches that are drawn but not used, and their finished trajectories.
    """

    last_step: int | None = None
    """No batches are started for steps after this one."""
    fetch_finished: Callable[[], FinishedTrajectories] = lambda: dict
    """Asks engines for the finished trajectories of requests that still run."""
    batches: deque[PromptBatch] = field(default_factory=deque)
    """Batches that are drawn from the data but not used yet, in order."""
    last_drawn: tuple[int, int] = (0, 0)
    """`step` and `first` of the last batch that was drawn."""
    _current_batches: list[PromptBatch] = field(default_factory=list)
    """Batches that the current step uses."""
    _resumed: dict[TrajectoryKey, ahead_files.FinishedTrajectory] = field(default_factory=dict)
    """Trajectories from a checkpoint, of batches that are not started yet."""
    _schedule_entries: list[replay.ScheduleEntry] = field(default_factory=list)
    """Schedule of the current step's trajectories, until it is written."""

    @property
    def max_ahead(self) -> int:
        """Batches that may wait behind the one in use."""
        return self.config.actor_rollout_ref.rollout.max_staleness

    def collect(self, step: int, timings: Timings) -> tuple[Samples, Metrics]:
        """As the base class; writes the schedule by which the step was sampled."""
        self._current_batches, self._schedule_entries = [], []
        collected = super().collect(step, timings)
        if self.max_ahead > 0:
            directory = Path(self.config.trainer.default_local_dir)
            replay.write(directory, step, self._schedule_entries)
        return collected

    def sample(self, step: int, first: int, num: int) -> list[Trajectory]:
        """Return the trajectories of the next batch, all of it, and keep others running behind."""
        self._start_batches(step)
        batch = self.batches.popleft()
        self._current_batches.append(batch)
        assert batch.request is not None, "_start_batches starts the batch of this step"
        trajectories = self.rollout.finish(batch.request)
        self._schedule_entries += map(replay.entry_of, trajectories)
        return trajectories

    def _start_batches(self, step: int) -> None:
        """Start the batch of this step and the next `max_staleness` batches, if not yet started."""
        for batch in itertools.islice(self.batches, self.max_ahead + 1):  # resumed: maybe more
            if batch.request is None:
                batch.request = self.start(batch)
        while len(self.batches) <= self.max_ahead:
            planned_step = step + len(self.batches)
            if self.batches and self.last_step is not None and planned_step > self.last_step:
                return
            rows = self.draw(self.config.data.train_batch_size)
            last_step, first = self.last_drawn
            if planned_step > last_step:
                self.last_drawn = planned_step, 0
            else:
                self.last_drawn = last_step, first + len(rows)
            batch = PromptBatch(*self.last_drawn, rows)
            batch.request = self.start(batch)
            self.batches.append(batch)

    def start(self, batch: PromptBatch) -> RolloutRequest:
        """Start sampling a batch, except for the trajectories that a checkpoint had."""
        starts, sampling = self.starts_of(batch.step, batch.first, batch.rows)
        return self.rollout.start(starts, sampling, self._take_resumed(starts))

    def _take_resumed(self, starts: Sequence[Trajectory]) -> dict[int, Trajectory]:
        """Return the trajectories that a checkpoint had of `starts`, by position."""
        finished: dict[int, Trajectory] = {}
        for i, start in enumerate(starts):
            entry = self._resumed.pop(start.key, None)
            trajectory = None if entry is None else entry.to_trajectory(start)
            if trajectory is not None:
                finished[i] = trajectory
        return finished

    def state_dict(self) -> dict[str, Any]:
        """Add the batches that are drawn but not used yet."""
        ahead = [{"step": b.step, "first": b.first, "rows": b.rows} for b in self.batches]
        return {**super().state_dict(), "ahead": ahead}

    def file_writer(self, state: RunState) -> FileWriter | None:
        """Return what writes the finished trajectories of the state's batches.

        Only those that are finished now, and were sampled by weights up to the state's version.
        None if none of the batches is started.
        """
        ids = {(batch["step"], batch["first"]) for batch in state.others.get("ahead", ())}
        started = [b for b in (*self._current_batches, *self.batches) if (b.step, b.first) in ids]
        requests = [batch.request for batch in started if batch.request is not None]
        if not requests:
            return None
        fetch_finished = self.fetch_finished()  # first, as it updates `request.finished`
        finished: dict[TrajectoryKey, Trajectory] = {}
        keys: set[TrajectoryKey] = set()
        for request in requests:
            request_keys = request.trajectory_keys
            keys.update(request_keys)
            finished |= {request_keys[i]: t for i, t in request.finished.items()}

        def write(step_dir: Path) -> None:
            fetched = {key: t for key, t in fetch_finished().items() if key in keys}
            ahead_files.write(step_dir, finished | fetched, state.version or 0)

        return write

    def load_checkpoint(self, state: RunState, folder: Path) -> None:
        """Continue with the batches of a checkpoint and their finished trajectories.

        The next step starts with the weights of the state's version. Trajectories that would be too
        stale for their step, because `max_staleness` was lowered, are sampled again.
        """
        super().load_checkpoint(state, folder)
        if starts_over(self.config, state.sampler, len(self.prompts)):
            return
        self.batches = deque(PromptBatch(**batch) for batch in state.others.get("ahead", ()))
        self.last_drawn = max(((b.step, b.first) for b in self.batches), default=self.last_drawn)
        oldest_version = {
            f"{batch.step}/{position}": state.next_version + number - self.max_ahead
            for number, batch in enumerate(self.batches)
            for position, _ in enumerate(batch.rows, batch.first)
        }
        self._resumed = {
            key: trajectory
            for key, trajectory in ahead_files.read(folder).items()
            if trajectory.group in oldest_version
            and min(trajectory.versions, default=state.next_version)
            >= oldest_version[trajectory.group]
        }


def source(parts: Parts, measures: Sequence[Measure]) -> AheadCollector | None:
    """Return the source of a run that samples ahead, or whose checkpoint has batches ahead."""
    overlaps = parts.config.actor_rollout_ref.rollout.max_staleness > 0
    if not overlaps and not _has_batches_ahead(parts.config):
        return None
    collector = AheadCollector(*parts.of_collector(measures))
    collector.last_step = parts.inputs.total_steps
    if overlaps and parts.rollouts is not None:
        collector.fetch_finished = parts.rollouts.fetch_finished
    return collector


def _has_batches_ahead(config: Config) -> bool:
    trainer = config.trainer
    folder = folders.resume_folder(trainer.resume_mode, Path(trainer.default_local_dir))
    return folder is not None and bool(RunState.read(folder).others.get("ahead"))
