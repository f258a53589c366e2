"""The part of a step that the training ranks do: look back at the batch, then learn from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from verl.config import Config
from verl.core_algos.advantages import ADVANTAGES, AdvantageEstimator
from verl.monitor.collapse import DRIFT, SHIFT
from verl.monitor.drift import correct_trajectories, drift_and_shift
from verl.monitor.performance import WorkCounter
from verl.trainer.experience import mini_batches, with_gradient
from verl.trainer.groups import TrainerRanks
from verl.trainer.metrics import mean_by_key
from verl.types import Metrics, TokenBatch


@dataclass
class Learner:
    """What the algorithm's options ask of the ranks, for one batch at a time."""

    config: Config
    ranks: TrainerRanks
    work: WorkCounter = field(init=False)
    """FLOPs by phase of the step, under the names of its clocks."""

    def __post_init__(self) -> None:
        self.work = WorkCounter(self.config)

    @property
    def advantage(self) -> AdvantageEstimator:
        """The row of the estimator."""
        return ADVANTAGES[self.config.algorithm.adv_estimator]

    def add_log_probs(self, batch: TokenBatch) -> None:
        """Old and reference log-probs, where an algorithm needs them.

        With a single update per step the old policy is the updating one, and the pass is spared:
        the ratio is exp(log_prob - log_prob.detach()).
        """
        if self.config.updates_per_step > 1 or self.config.kl_in_reward:
            batch.tokens["old_log_probs"] = self.ranks.log_probs(batch)
            self.work.looks("old_log_prob", self.work.policy, batch)
        if self.config.needs_reference:
            batch.tokens["ref_log_probs"] = self.ranks.ref_log_probs(batch)
            self.work.looks("old_log_prob", self.work.reference, batch)

    def add_values(self, batch: TokenBatch) -> None:
        """The critic's view of the states, for estimators that ask for it."""
        if self.advantage.needs_critic:
            batch.tokens["values"] = self.ranks.values(batch)
            self.work.looks("values", self.work.critic, batch)

    def mini_batches(
        self, batch: TokenBatch, step: int, size: int, epochs: int
    ) -> list[TokenBatch]:
        """The step's mini-batches, in an order that depends on seed and step alone."""
        order = np.random.default_rng((self.config.trainer.seed, step))
        return mini_batches(batch, self.config, size, epochs, order)

    def update_critic(self, batch: TokenBatch, step: int) -> Metrics:
        """The value function's epochs over the batch."""
        if not self.advantage.needs_critic:
            return {}
        critic = self.config.critic
        size = critic.ppo_mini_batch_size or self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        minis = self.mini_batches(batch, step, size, critic.ppo_epochs)
        for mini in minis:
            self.work.learns("update_critic", self.work.critic, mini)
        return mean_by_key([self.ranks.update_critic(mini) for mini in minis])

    def update_actor(self, batch: TokenBatch, step: int) -> Metrics:
        """The policy's epochs over the batch; none while the critic warms up."""
        if step <= self.config.trainer.critic_warmup and self.advantage.needs_critic:
            return {}
        actor = self.config.actor_rollout_ref.actor
        minis = self.mini_batches(batch, step, actor.ppo_mini_batch_size, actor.ppo_epochs)
        if not self.config.needs_every_trajectory:
            minis = [with_gradient(mini) for mini in minis]
        for mini in minis:
            self.work.learns("update_actor", self.work.policy, mini)
        found = [self.ranks.update_actor(mini) for mini in minis]
        # Without any trajectory to learn from, an update has no entropy and no gradient to report.
        return mean_by_key([row for mini, row in zip(minis, found, strict=True) if len(mini)])

    def drift(self, batch: TokenBatch) -> Metrics:
        """What the updates did to the log-probs of some correct trajectories, for the guard."""
        guard = self.config.trainer.guard
        again = correct_trajectories(batch, guard.drift_trajectories if guard.enable else 0)
        if not len(again):
            return {}
        after = self.ranks.log_probs(again)
        drift, shift = drift_and_shift(again, after)
        return {DRIFT: drift, SHIFT: shift}
