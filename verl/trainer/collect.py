"""Collects the trajectories of a training step: samples, scores and filters them."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.core_algos.chosen import advantage_estimator
from verl.core_algos.jagged import ROUNDING
from verl.data.sampler import Sampler, starts_over
from verl.errors import ToolOutage
from verl.rewards.interface import Reward, RewardManager
from verl.trainer.hooks import Stateful
from verl.trainer.metrics import fault_metrics, reward_metrics, rollout_metrics
from verl.types import Metrics, Prompt, Sampling, Status, Trajectory, start_trajectory

if TYPE_CHECKING:
    from verl.checkpoint.folders import RunState
    from verl.config import Config
    from verl.monitor.performance import Timings
    from verl.rollout.rollouts import Rollouts

logger = logging.getLogger(__name__)

Measure = Callable[[Sequence[Trajectory]], Metrics]
"""Returns metrics of all trajectories that a step has sampled, failed ones too."""


def trajectory_seed(*key: int) -> int:
    """Return a 31-bit seed that depends on every part of the key (run seed, step, index)."""
    return int(np.random.SeedSequence(key).generate_state(1)[0] & 0x7FFFFFFF)


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

    def all_wrong_groups(self) -> set[str]:
        """Return the groups whose members all have a known outcome, none of which is right."""
        pairs = list(zip(self.trajectories, self.rewards, strict=True))
        return set(self.groups()) - {t.group for t, r in pairs if r.is_right is not False}

    def groups_with_reward_variance(self) -> list[str]:
        """Return the groups whose members have unequal scores, in order of appearance."""
        scores: dict[str, list[float]] = {}
        for trajectory, reward in zip(self.trajectories, self.rewards, strict=True):
            scores.setdefault(trajectory.group, []).append(reward.score)
        close = {"rel_tol": ROUNDING, "abs_tol": ROUNDING}
        return [group for group, s in scores.items() if not math.isclose(min(s), max(s), **close)]


def has_gate(config: Config) -> bool:
    """Whether groups that are all wrong are left out of the advantages (`outcome_gate`)."""
    algorithm = config.algorithm
    compares = advantage_estimator(algorithm.adv_estimator).needs_groups
    return algorithm.outcome_gate and compares and not config.is_as_original


def live_groups(sampled: Samples, config: Config) -> list[str]:
    """Return the groups from whose scores something is learned, in order of appearance."""
    wrong = sampled.all_wrong_groups() if has_gate(config) else set()
    return [group for group in sampled.groups_with_reward_variance() if group not in wrong]


def num_further_prompts(num_sampled: int, num_live: int, size: int) -> int:
    """Return how many prompts, at most `size`, probably replace the groups that are not live.

    As many as have the missing live groups and their square root (about a standard deviation) in
    the mean, if as large a share of them is live as of those that were sampled.
    """
    missing = size - num_live
    if num_live == 0:
        return size
    return min(size, math.ceil((missing + math.sqrt(missing)) * num_sampled / num_live))


def select_for_training(
    sampled: Samples, config: Config, step: int, num_prompts: int
) -> tuple[Samples, Metrics]:
    """Return the samples that a step trains on, and metrics of the selection.

    Without dynamic sampling (`algorithm.filter_groups`), these are all samples, without metrics.
    With it, these are the first `data.train_batch_size` `live_groups` or, if there is
    none, the first groups. `num_prompts` is the number of prompts that were sampled.
    """
    if not config.algorithm.filter_groups.enable:
        return sampled, {}
    size = config.data.train_batch_size
    groups = live_groups(sampled, config)[:size]
    metrics = {"rollout/gen_batches": num_prompts / size, "rollout/kept_groups": float(len(groups))}
    if not groups:
        logger.warning("step %d: no group of %d prompts has a signal: their scores are equal, or "
                       "all their answers are wrong", step, num_prompts)  # fmt: skip
        groups = sampled.groups()[:size]
    return sampled.select_groups(set(groups)), metrics


def complete_groups(
    trajectories: Sequence[Trajectory], failed: Sequence[Trajectory], label: str, max_share: float,
    earlier: tuple[int, int] = (0, 0),
) -> list[Trajectory]:  # fmt: skip
    """Return the trajectories of all groups without a failure.

    A group with a failure is dropped as a whole: mostly trajectories that call tools fail, and the
    others alone would misrepresent the group. `label` names the trajectories in messages, as in
    `step 3`, of which some may have been sampled before: of `earlier`, how many were lost, and all.
    Raises ToolOutage as `check_lost_share` does.
    """
    incomplete = {trajectory.group for trajectory in failed}
    kept = [t for t in trajectories if t.group not in incomplete]
    num_lost, num_total = earlier
    num_lost, num_total = num_lost + len(trajectories) - len(kept), num_total + len(trajectories)
    check_lost_share(failed, num_lost, num_total, label, max_share)
    return kept


def check_lost_share(
    failed: Sequence[Trajectory], num_lost: int, num_total: int, label: str, max_share: float
) -> None:
    """Log the failed trajectories; raise ToolOutage if all or more than `max_share` are lost."""
    if not failed:
        return
    message = (
        f"{label}: {len(failed)} trajectories failed repeatedly although the tools answer, "
        f"the last ({failed[-1].prompt.uid}) with: {failed[-1].error}; {num_lost} of {num_total} "
        "are lost with them"
    )
    if num_lost / num_total > max_share or num_lost == num_total:
        allowed = f"{math.ceil(1000 * num_lost / num_total) / 1000:g}"
        allow = "" if num_lost == num_total else f", or allow it: trainer.max_lost_share={allowed}"
        raise ToolOutage(
            f"{message}, more than trainer.max_lost_share={max_share:g}; fix: correct the "
            f"cause of the failures{allow}"
        )
    logger.warning("%s", message)


class Source(Stateful, ABC):
    """Where a step's trajectories come from; its state is part of checkpoints."""

    sampled: Samples
    """All samples of the last step, also those that it does not train on."""

    @abstractmethod
    def collect(self, step: int, timings: Timings) -> tuple[Samples, Metrics]:
        """Return the samples that a step trains on, and metrics of all of them."""


@dataclass
class RolloutCollector(Source):
    """Samples and scores each step's trajectories with the current weights."""

    config: Config
    rollout: Rollouts
    prompts: Sequence[Prompt]
    sampler: Sampler
    reward: RewardManager
    measures: Sequence[Measure] = ()
    sampled: Samples = field(init=False, default_factory=Samples)
    _drawn: list[int] = field(init=False, default_factory=list)
    """Rows that are drawn from the data but not sampled yet, in order."""

    def collect(self, step: int, timings: Timings) -> tuple[Samples, Metrics]:
        """Return trajectories of `train_batch_size` prompts, and metrics of all sampled ones.

        With `algorithm.filter_groups` (dynamic sampling, Yu et al. 2025), groups that are not
        `live_groups` are replaced by groups of further prompts, for at most `max_num_gen_batches`
        times as many prompts. If there is no live group, the step uses one batch of them.
        """
        filters, size = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        sampled = Samples()
        trajectories: list[Trajectory] = []
        num_prompts = num_live = 0
        max_prompts = size * (filters.max_num_gen_batches if filters.enable else 1)
        while num_prompts < max_prompts and num_live < size:
            further = num_further_prompts(num_prompts, num_live, size)
            with timings.phase("gen"):
                finished = self.sample(step, num_prompts, min(further, max_prompts - num_prompts))
            earlier = len(trajectories) - len(sampled.trajectories), len(trajectories)
            scored = self._score(finished, step, timings, earlier)
            sampled.extend(scored)
            trajectories += finished
            num_live += len(live_groups(scored, self.config))
            num_prompts = len({t.group for t in trajectories})
        self.rollout.sleep()
        self.sampled = sampled
        num_dropped = len(trajectories) - len(sampled.trajectories)
        metrics = {**rollout_metrics(trajectories), **reward_metrics(sampled.rewards)}
        metrics |= fault_metrics(trajectories, num_dropped)
        metrics |= self.sampler.observe(sampled.trajectories, sampled.rewards)
        for measure in self.measures:
            metrics |= measure(trajectories)
        selected, selection_metrics = select_for_training(sampled, self.config, step, num_prompts)
        return selected, metrics | selection_metrics

    def sample(self, step: int, first: int, num: int) -> list[Trajectory]:
        """Return the trajectories of a step's next `num` prompts, failed ones too."""
        starts, sampling = self.starts_of(step, first, self.draw(num))
        return self.rollout.generate(starts, sampling)

    def draw(self, num: int) -> list[int]:
        """Return the next `num` rows of the data."""
        while len(self._drawn) < num:
            self._drawn += self.sampler.next_batch()
        rows, self._drawn = self._drawn[:num], self._drawn[num:]
        return rows

    def starts_of(
        self, step: int, first: int, rows: Sequence[int]
    ) -> tuple[list[Trajectory], Sampling]:
        """Return trajectories before sampling; the first row is prompt number `first` of a step.

        Group and seed of each are derived from `step` and the number of its prompt.
        """
        rollout = self.config.actor_rollout_ref.rollout
        length = self.config.data.max_response_length
        sampling = Sampling(length, rollout.temperature, rollout.top_p)
        starts = [
            start_trajectory(
                self.prompts[row],
                group=f"{step}/{position}",
                sample=sample,
                seed=trajectory_seed(self.config.trainer.seed, step, position, sample),
            )
            for position, row in enumerate(rows, first)
            for sample in range(rollout.n_agent)
        ]
        return starts, sampling

    def _score(
        self, trajectories: list[Trajectory], step: int, timings: Timings, earlier: tuple[int, int]
    ) -> Samples:
        """Score the groups none of whose members failed. Raises ToolOutage if too many did."""
        failed = [t for t in trajectories if t.status is Status.FAILED]
        max_lost_share = self.config.trainer.max_lost_share
        complete = complete_groups(trajectories, failed, f"step {step}", max_lost_share, earlier)
        with timings.phase("reward"):
            return Samples(complete, self.reward(complete))

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""
        return {"sampler": self.sampler.state_dict(), "drawn": list(self._drawn)}

    def load_checkpoint(self, state: RunState, folder: Path) -> None:
        """Continue at the checkpoint's position; `starts_over` says when there is none."""
        num_rows, saved = len(self.prompts), state.sampler
        if starts_over(self.config, saved, num_rows):
            logger.warning("the data has %d rows instead of the checkpoint's %s: training goes on "
                           "with the first of them", num_rows, saved["num_rows"])  # fmt: skip
            return
        self.sampler.load_state_dict(state.sampler)
        self._drawn = list(state.others.get("drawn", ()))
