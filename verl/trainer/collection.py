"""Collects the trajectories of a training step: samples, scores and filters them."""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.checkpoint import prefetched
from verl.config import Config
from verl.core_algos.jagged import ROUNDING
from verl.data import PromptSampler
from verl.data.trajectories import Signals, write_step
from verl.monitor.performance import Timings
from verl.rewards.interface import Reward, RewardManager
from verl.rollout import schedule
from verl.rollout.pool import RetryingRollout, RolloutRequest, complete_groups, trajectory_keys
from verl.trainer.metrics import reward_metrics, rollout_metrics
from verl.trainer.validation import trajectory_seed
from verl.types import (
    Metrics,
    Prompt,
    Sampling,
    Status,
    Trajectory,
    TrajectoryKey,
    start_trajectory,
)

logger = logging.getLogger(__name__)


@dataclass
class Samples:
    """Scored trajectories; none of them failed."""

    trajectories: list[Trajectory] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)

    def extend(self, other: Samples) -> None:
        """Append `other`."""
        self.trajectories += other.trajectories
        self.rewards += other.rewards

    def select_groups(self, groups: set[str]) -> Samples:
        """Return the samples of the named groups."""
        kept = [i for i, t in enumerate(self.trajectories) if t.group in groups]
        return Samples([self.trajectories[i] for i in kept], [self.rewards[i] for i in kept])

    def groups(self) -> list[str]:
        """Return all groups, in order of appearance."""
        return list(dict.fromkeys(t.group for t in self.trajectories))

    def groups_with_reward_variance(self) -> list[str]:
        """Return the groups whose members have unequal scores, in order of appearance."""
        scores: dict[str, list[float]] = {}
        for trajectory, reward in zip(self.trajectories, self.rewards, strict=True):
            scores.setdefault(trajectory.group, []).append(reward.score)
        close = {"rel_tol": ROUNDING, "abs_tol": ROUNDING}
        return [group for group, s in scores.items() if not math.isclose(min(s), max(s), **close)]


def select_for_training(
    sampled: Samples, config: Config, step: int, num_batches: int
) -> tuple[Samples, Metrics]:
    """Return the samples that a step trains on, and metrics of the selection.

    Without dynamic sampling (`algorithm.filter_groups`), these are all samples, without metrics.
    With it, these are the first `data.train_batch_size` groups with unequal scores or, if there is
    none, the first groups. `num_batches` is the number of batches that were sampled.
    """
    if not config.algorithm.filter_groups.enable:
        return sampled, {}
    size = config.data.train_batch_size
    groups = sampled.groups_with_reward_variance()[:size]
    metrics = {"rollout/gen_batches": float(num_batches), "rollout/kept_groups": float(len(groups))}
    if not groups:
        logger.warning("step %d: every group of %d batches has equal scores", step, num_batches)
        groups = sampled.groups()[:size]
    return sampled.select_groups(set(groups)), metrics


@dataclass
class PromptBatch:
    """Prompts that are sampled together; groups and seeds are derived from `step` and `first`.

    The batch is planned for `step`, and its first prompt is number `first` of that step's prompts.
    Dynamic sampling may use several batches in one step, also batches planned for later steps.
    """

    step: int
    first: int
    rows: list[int]
    request: RolloutRequest | None = None
    """The request for the trajectories, once it is started."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores; the same trajectories are started again from it."""
        return {"step": self.step, "first": self.first, "rows": self.rows}


@dataclass
class RolloutCollector:
    """Samples and scores each step's trajectories; with `max_staleness`, some steps ahead of time.

    Batches are started and used in the order of the data, and at most `max_staleness` batches wait
    behind the one in use. So the batch of step t was started at step t - max_staleness or later,
    and was sampled by the weights of that step or newer ones, which bounds its staleness.
    """

    config: Config
    rollout: RetryingRollout
    prompts: Sequence[Prompt]
    sampler: PromptSampler
    reward: RewardManager
    last_step: int | None = None
    """No batches are started for steps after this one."""
    batches: deque[PromptBatch] = field(default_factory=deque)
    """Batches that are drawn from the data but not used yet, in order."""
    last_drawn: tuple[int, int] = (0, 0)
    """`step` and `first` of the last batch that was drawn."""
    _current_batches: list[PromptBatch] = field(default_factory=list)
    """Batches that the current step uses."""
    _resumed: dict[TrajectoryKey, prefetched.FinishedTrajectory] = field(default_factory=dict)
    """Trajectories from a checkpoint, of batches that are not started yet."""
    _schedule_entries: list[schedule.ScheduleEntry] = field(default_factory=list)
    """Schedule of the current step's trajectories, until it is written."""
    _sampled: Samples = field(default_factory=Samples)
    """All samples of the current step, until they are recorded."""

    def collect(self, step: int, timings: Timings) -> tuple[Samples, Metrics]:
        """Return trajectories of `train_batch_size` prompts, and metrics of all sampled ones.

        With `algorithm.filter_groups` (dynamic sampling, Yu et al. 2025), groups of equal scores
        are replaced by groups of further prompts, for at most `max_num_gen_batches` batches. If all
        groups have equal scores, the step uses one batch of them.
        """
        filters, size = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        sampled = Samples()
        trajectories: list[Trajectory] = []
        num_batches = num_kept_groups = 0
        self._current_batches = []
        while num_batches == 0 or (
            filters.enable and num_kept_groups < size and num_batches < filters.max_num_gen_batches
        ):
            batch_samples, batch_trajectories = self._sample_batch(step, timings)
            sampled.extend(batch_samples)
            trajectories += batch_trajectories
            num_kept_groups += len(batch_samples.groups_with_reward_variance())
            num_batches += 1
        self.rollout.sleep()
        if self._schedule_entries:
            directory = Path(self.config.trainer.default_local_dir)
            schedule.write(directory, step, self._schedule_entries)
            self._schedule_entries = []
        self._sampled = sampled
        metrics = {**rollout_metrics(trajectories), **reward_metrics(sampled.rewards)}
        metrics |= self.rollout.take_faults()
        selected, selection_metrics = select_for_training(sampled, self.config, step, num_batches)
        return selected, metrics | selection_metrics

    def record(self, step: int, samples: Samples, signals: Sequence[Signals]) -> None:
        """Write all samples of a step, with the signals of those that it trains on (`samples`)."""
        directory = self.config.trainer.rollout_data_dir
        assert directory is not None
        keys = [(t.group, t.sample) for t in samples.trajectories]
        signals_by_key = dict(zip(keys, signals, strict=True))
        sampled, self._sampled = self._sampled, Samples()
        write_step(directory, step, sampled.trajectories, sampled.rewards, signals_by_key)

    def _sample_batch(self, step: int, timings: Timings) -> tuple[Samples, list[Trajectory]]:
        """Return one batch's scored samples, and all its trajectories including failed ones."""
        with timings.phase("gen"):
            self.start_batches(step)
            batch = self.batches.popleft()
            self._current_batches.append(batch)
            assert batch.request is not None, "start_batches starts the batch of this step"
            trajectories = self.rollout.finish(batch.request)
        if self.config.actor_rollout_ref.rollout.max_staleness > 0:
            self._schedule_entries += map(schedule.entry_of, trajectories)
        failed = [t for t in trajectories if t.status is Status.FAILED]
        max_lost_share = self.config.trainer.max_lost_share
        complete = complete_groups(trajectories, failed, f"step {step}", max_lost_share)
        self.rollout.faults["trajectories_dropped"] += len(trajectories) - len(complete)
        with timings.phase("reward"):
            samples = Samples(complete, self.reward(complete))
        return samples, trajectories

    def start_batches(self, step: int) -> None:
        """Start the batch of this step and the next `max_staleness` batches, if not yet started."""
        max_ahead = self.config.actor_rollout_ref.rollout.max_staleness
        for batch in itertools.islice(self.batches, max_ahead + 1):  # a resumed run may have more
            if batch.request is None:
                self._start(batch)
        while len(self.batches) <= max_ahead:
            planned_step = step + len(self.batches)
            if self.batches and self.last_step is not None and planned_step > self.last_step:
                return
            rows = self.sampler.next_batch()
            last_step, first = self.last_drawn
            if planned_step > last_step:
                self.last_drawn = planned_step, 0
            else:
                self.last_drawn = last_step, first + len(rows)
            self.batches.append(PromptBatch(*self.last_drawn, rows))
            self._start(self.batches[-1])

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the batches that are drawn but not used yet."""
        return [batch.state_dict() for batch in self.batches]

    def prefetched_writer(
        self, batches: Sequence[Mapping[str, Any]], newest: int
    ) -> Callable[[Path], None] | None:
        """Return a function that writes the finished trajectories of `batches` into a checkpoint.

        `batches` are from a `state_dict`. Only trajectories that are finished now and were sampled
        by weights up to version `newest` are written. The function may be called later and in any
        thread. Returns None if none of the batches is started.
        """
        ids = {(batch["step"], batch["first"]) for batch in batches}
        started = [b for b in (*self._current_batches, *self.batches) if (b.step, b.first) in ids]
        requests = [batch.request for batch in started if batch.request is not None]
        if not requests:
            return None
        fetch_finished = self.rollout.fetch_finished()  # first, as it updates `request.finished`
        finished: dict[TrajectoryKey, Trajectory] = {}
        keys: set[TrajectoryKey] = set()
        for request in requests:
            request_keys = request.trajectory_keys
            keys.update(request_keys)
            finished |= {request_keys[i]: t for i, t in request.finished.items()}

        def write(step_dir: Path) -> None:
            fetched = {key: t for key, t in fetch_finished().items() if key in keys}
            prefetched.write(step_dir, finished | fetched, newest)

        return write

    def load_state_dict(
        self,
        state: Sequence[Mapping[str, Any]],
        finished: Mapping[TrajectoryKey, prefetched.FinishedTrajectory] | None = None,
        version: int = 0,
    ) -> None:
        """Continue with the batches of a checkpoint and their `finished` trajectories.

        The next step starts with the weights of `version`. Trajectories that would be too stale for
        their step, because `max_staleness` was lowered, are sampled again.
        """
        self.batches = deque(PromptBatch(**batch) for batch in state)
        self.last_drawn = max(((b.step, b.first) for b in self.batches), default=self.last_drawn)
        max_staleness = self.config.actor_rollout_ref.rollout.max_staleness
        oldest_version = {
            f"{batch.step}/{position}": version + number - max_staleness
            for number, batch in enumerate(self.batches)
            for position, _ in enumerate(batch.rows, batch.first)
        }
        self._resumed = {
            key: trajectory
            for key, trajectory in (finished or {}).items()
            if trajectory.group in oldest_version
            and min(trajectory.versions, default=version) >= oldest_version[trajectory.group]
        }

    def _start(self, batch: PromptBatch) -> None:
        """Start sampling a batch; each trajectory has its own seed."""
        rollout = self.config.actor_rollout_ref.rollout
        length = self.config.data.max_response_length
        sampling = Sampling(length, rollout.temperature, rollout.top_p)
        starts = [
            start_trajectory(
                self.prompts[row],
                group=f"{batch.step}/{position}",
                sample=sample,
                seed=trajectory_seed(self.config.trainer.seed, batch.step, position, sample),
            )
            for position, row in enumerate(batch.rows, batch.first)
            for sample in range(rollout.n_agent)
        ]
        batch.request = self.rollout.start(starts, sampling, self._take_resumed(starts))

    def _take_resumed(self, starts: Sequence[Trajectory]) -> dict[int, Trajectory]:
        """Return the trajectories that a checkpoint had of `starts`, by position."""
        finished: dict[int, Trajectory] = {}
        for i, key in enumerate(trajectory_keys(starts)):
            entry = self._resumed.pop(key, None)
            trajectory = None if entry is None else entry.to_trajectory(starts[i])
            if trajectory is not None:
                finished[i] = trajectory
        return finished
