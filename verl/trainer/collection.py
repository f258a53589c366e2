"""The trajectories of one training step: sampled, scored, and filtered by variance of reward."""

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
from verl.checkpoint.prefetched import FinishedTrajectory
from verl.config import Config
from verl.core_algos.jagged import ROUNDING
from verl.data import PromptSampler
from verl.data.trajectories import Signals, write_step
from verl.rewards.interface import Reward, RewardManager
from verl.rollout import schedule
from verl.rollout.pool import RetryingRollout, RolloutRequest, complete_groups, trajectory_keys
from verl.trainer.metrics import Timings, reward_metrics, rollout_metrics
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
    """Scored trajectories, none of which failed."""

    trajectories: list[Trajectory] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)
    greedy_scores: list[float] = field(default_factory=list)
    """For ReMax: the score of the greedy trajectory of each one's prompt."""

    def extend(self, other: Samples) -> None:
        """Append another's."""
        self.trajectories += other.trajectories
        self.rewards += other.rewards
        self.greedy_scores += other.greedy_scores

    def select(self, groups: set[str]) -> Samples:
        """Those of the named groups."""
        kept = [i for i, t in enumerate(self.trajectories) if t.group in groups]
        return Samples(
            [self.trajectories[i] for i in kept],
            [self.rewards[i] for i in kept],
            [self.greedy_scores[i] for i in kept if self.greedy_scores],
        )

    def groups(self) -> list[str]:
        """All groups, in order of appearance."""
        return list(dict.fromkeys(t.group for t in self.trajectories))

    def groups_with_reward_variance(self) -> list[str]:
        """Groups whose members do not all have the same score, in order of appearance."""
        scores: dict[str, list[float]] = {}
        for trajectory, reward in zip(self.trajectories, self.rewards, strict=True):
            scores.setdefault(trajectory.group, []).append(reward.score)
        close = {"rel_tol": ROUNDING, "abs_tol": ROUNDING}
        return [group for group, s in scores.items() if not math.isclose(min(s), max(s), **close)]


def chosen(sampled: Samples, config: Config, step: int, rounds: int) -> tuple[Samples, Metrics]:
    """What a step learns from, of all that was sampled for it in so many batches."""
    if not config.algorithm.filter_groups.enable:
        return sampled, {}
    size = config.data.train_batch_size
    groups = sampled.groups_with_reward_variance()[:size]
    counts = {"rollout/gen_batches": float(rounds), "rollout/kept_groups": float(len(groups))}
    if not groups:
        logger.warning("step %d: every group of %d batches has equal scores", step, rounds)
        groups = sampled.groups()[:size]
    return sampled.select(set(groups)), counts


@dataclass
class PromptBatch:
    """Prompts that are sampled together; `step` and `first` number their groups and seeds.

    `step` is the one that they are planned for, and `first` the number of the first among that
    step's prompts: dynamic sampling takes several batches for one step, or one planned for a later.
    """

    step: int
    first: int
    rows: list[int]
    requests: list[RolloutRequest] = field(default_factory=list)
    """Their trajectories and, where they are needed, the greedy ones."""

    def state_dict(self) -> dict[str, Any]:
        """What of it goes into a checkpoint: its trajectories are started again as they were."""
        return {"step": self.step, "first": self.first, "rows": self.rows}


@dataclass
class RolloutCollector:
    """Samples steps' trajectories and scores them; with `max_staleness` some steps ahead.

    Batches are started and taken in the order of the data, and no more than `max_staleness` wait
    behind the one that is taken. So what step t trains on was started at step t - max_staleness or
    later, by the weights of its start or newer ones: that is the bound on its age.
    """

    config: Config
    rollout: RetryingRollout
    prompts: Sequence[Prompt]
    sampler: PromptSampler
    reward: RewardManager
    with_greedy: bool = False
    """Also sample a greedy trajectory for each prompt: the baseline of ReMax, never trained on."""
    last_step: int | None = None
    """Nothing is started for the steps after this one."""
    batches: deque[PromptBatch] = field(default_factory=deque)
    """Drawn and not taken yet, in order."""
    drawn: tuple[int, int] = (0, 0)
    """`step` and `first` of the last batch that was drawn."""
    _taking: list[PromptBatch] = field(default_factory=list)
    """Those that the present step has taken."""
    _resumed: dict[TrajectoryKey, FinishedTrajectory] = field(default_factory=dict)
    """What a checkpoint had of batches that are not started yet."""
    _taken: list[schedule.ScheduleEntry] = field(default_factory=list)
    _sampled: Samples = field(default_factory=Samples)
    """All that the present step has, until it is recorded."""

    def collect(self, step: int, timings: Timings) -> tuple[Samples, Metrics]:
        """`train_batch_size` prompts' trajectories, and metrics of all that were sampled.

        With `algorithm.filter_groups` (dynamic sampling, Yu et al. 2025) groups of equal scores
        are replaced by those of further prompts, for at most `max_num_gen_batches` batches; where
        all of those are of equal scores, the step takes one batch of them.
        """
        filters, size = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        sampled, rounds = Samples(), 0
        everyone: list[Trajectory] = []
        num_kept = 0
        self._taking = []
        while rounds == 0 or (
            filters.enable and num_kept < size and rounds < filters.max_num_gen_batches
        ):
            found, batch = self._sample_batch(step, timings)
            everyone += batch
            sampled.extend(found)
            num_kept, rounds = num_kept + len(found.groups_with_reward_variance()), rounds + 1
        self.rollout.sleep()
        if self._taken:
            schedule.write(Path(self.config.trainer.default_local_dir), step, self._taken)
            self._taken = []
        self._sampled = sampled
        metrics = {**rollout_metrics(everyone), **reward_metrics(sampled.rewards)}
        metrics |= self.rollout.take_faults()
        kept, counts = chosen(sampled, self.config, step, rounds)
        return kept, metrics | counts

    def record(self, step: int, samples: Samples, signals: Sequence[Signals]) -> None:
        """Write what was sampled for a step, with the signals of those that it learns from."""
        directory = self.config.trainer.rollout_data_dir
        assert directory is not None
        named = zip(((t.group, t.sample) for t in samples.trajectories), signals, strict=True)
        everyone, self._sampled = self._sampled, Samples()
        write_step(directory, step, everyone.trajectories, everyone.rewards, everyone.greedy_scores,
                   dict(named))  # fmt: skip

    def _sample_batch(self, step: int, timings: Timings) -> tuple[Samples, list[Trajectory]]:
        """One batch of prompts: its scored trajectories, and all of them, failed ones too."""
        with timings.phase("gen"):
            self.start_ahead(step)
            batch = self.batches.popleft()
            self._taking.append(batch)
            trajectories, *greedy = [self.rollout.finish(request) for request in batch.requests]
            baseline = greedy[0] if greedy else []
        if self.config.actor_rollout_ref.rollout.max_staleness > 0:
            self._taken += [schedule.entry_of(t, greedy=False) for t in trajectories]
            self._taken += [schedule.entry_of(t, greedy=True) for t in baseline]
        failed = [t for t in (*trajectories, *baseline) if t.status is Status.FAILED]
        share = self.config.trainer.max_lost_share
        alive = complete_groups(trajectories, failed, f"step {step}", share)
        self.rollout.faults["trajectories_dropped"] += len(trajectories) - len(alive)
        with timings.phase("reward"):
            samples = Samples(alive, self.reward(alive))
            if self.with_greedy:
                samples.greedy_scores = self._greedy_scores(baseline, samples)
        return samples, trajectories

    def start_ahead(self, step: int) -> None:
        """Have a batch for this step, and those of the next `max_staleness` steps behind it."""
        most = self.config.actor_rollout_ref.rollout.max_staleness
        for batch in itertools.islice(self.batches, most + 1):  # a resumed run may have more
            if not batch.requests:
                self._start(batch)
        while len(self.batches) <= most:
            planned = step + len(self.batches)
            if self.batches and self.last_step is not None and planned > self.last_step:
                return
            rows, (last, first) = self.sampler.next_batch(), self.drawn
            self.drawn = (planned, 0) if planned > last else (last, first + len(rows))
            self.batches.append(PromptBatch(*self.drawn, rows))
            self._start(self.batches[-1])

    def restart(self) -> None:
        """Forget what was sampled ahead: those batches are started again when one is needed."""
        for batch in self.batches:
            for request in batch.requests:
                self.rollout.abandon(request)
            batch.requests = []

    def state_dict(self) -> list[dict[str, Any]]:
        """The batches that are drawn and not taken yet."""
        return [batch.state_dict() for batch in self.batches]

    def writer(
        self, batches: Sequence[Mapping[str, Any]], newest: int
    ) -> Callable[[Path], None] | None:
        """What writes those of `batches`, of a `state_dict`, that are finished by now, sampled by
        weights up to the version `newest`, into a checkpoint: in any thread, and whenever."""
        named = {(batch["step"], batch["first"]) for batch in batches}
        known = [b for b in (*self._taking, *self.batches) if (b.step, b.first) in named]
        requests = [request for batch in known for request in batch.requests]
        if not requests:
            return None
        fetch_finished = self.rollout.fetch_finished()  # which also takes what is answered
        keyed_requests = [(request, request.trajectory_keys) for request in requests]
        found = {names[i]: one for request, names in keyed_requests
                 for i, one in request.finished.items()}  # fmt: skip
        wanted = {name for _, names in keyed_requests for name in names}

        def write(step_dir: Path) -> None:
            late = fetch_finished()
            prefetched.write(step_dir, found | {n: late[n] for n in late if n in wanted}, newest)

        return write

    def load_state_dict(
        self,
        state: Sequence[Mapping[str, Any]],
        finished: Mapping[TrajectoryKey, FinishedTrajectory] | None = None,
        version: int = 0,
    ) -> None:
        """Go on with the batches that a run had drawn, and with what it had finished of them.

        The next step is to be trained with the weights of `version`: what would be too old for its
        own step, since `max_staleness` is another now, is sampled again.
        """
        self.batches = deque(PromptBatch(**batch) for batch in state)
        self.drawn = max(((b.step, b.first) for b in self.batches), default=self.drawn)
        most = self.config.actor_rollout_ref.rollout.max_staleness
        oldest = {f"{batch.step}/{position}": version + number - most
                  for number, batch in enumerate(self.batches)
                  for position, _ in enumerate(batch.rows, batch.first)}  # fmt: skip
        self._resumed = {
            name: one for name, one in (finished or {}).items()
            if one.group in oldest and min(one.versions, default=version) >= oldest[one.group]
        }  # fmt: skip

    def _start(self, batch: PromptBatch) -> None:
        """Begin to sample a batch: each trajectory has a seed of its own."""
        rollout = self.config.actor_rollout_ref.rollout
        length = self.config.data.max_response_length
        kinds = [(rollout.n_agent, Sampling(length, rollout.temperature, rollout.top_p))]
        if self.with_greedy:
            kinds.append((1, Sampling(length, temperature=0.0, top_p=1.0)))
        for n, sampling in kinds:
            starts = [
                start_trajectory(
                    self.prompts[row],
                    group=f"{batch.step}/{position}",
                    sample=sample,
                    seed=trajectory_seed(self.config.trainer.seed, batch.step, position, sample),
                )
                for position, row in enumerate(batch.rows, batch.first)
                for sample in range(n)
            ]
            finished = self._finished(starts, sampling)
            batch.requests.append(self.rollout.start(starts, sampling, finished))

    def _finished(self, starts: Sequence[Trajectory], sampling: Sampling) -> dict[int, Trajectory]:
        """By position, those that a checkpoint had."""
        if not self._resumed:
            return {}
        rows = [self._resumed.pop(name, None) for name in trajectory_keys(starts, sampling)]
        found = {i: row.to_trajectory(starts[i]) for i, row in enumerate(rows) if row is not None}
        return {i: one for i, one in found.items() if one is not None}

    def _greedy_scores(self, greedy: Sequence[Trajectory], samples: Samples) -> list[float]:
        """The score of each trajectory's greedy counterpart."""
        groups = set(samples.groups())
        alive = [t for t in greedy if t.group in groups]
        known = {t.group: r.score for t, r in zip(alive, self.reward(alive), strict=True)}
        return [known[t.group] for t in samples.trajectories]
