"""The part of a step after sampling: the batch, log-probs and values, advantages, the updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from verl.config import Config
from verl.core_algos.advantages import ADVANTAGES, AdvantageEstimator, AdvantageInputs
from verl.core_algos.jagged import outcome_to_tokens, segment_sum, sequence_ids
from verl.core_algos.kl import KLController, apply_kl_in_reward, mean_sequence_kl
from verl.core_algos.losses import loss_weights
from verl.core_algos.shaping import clip_advantages, overlong_penalty
from verl.data.trajectories import SIGNALS, Signals
from verl.errors import ConfigError, explain
from verl.monitor.guard import DRIFT, SHIFT, correct_trajectories, drift_and_shift
from verl.monitor.performance import Timings, WorkCounter
from verl.packing import share_prompts
from verl.trainer.collection import Samples
from verl.trainer.metrics import mean_by_key
from verl.trainer.ranks import TrainerRanks
from verl.training.actor import rollout_correction
from verl.types import Metrics, TokenBatch

NO_LOG_PROBS_FIX = ("actor_rollout_ref.actor.old_log_probs=recompute, actor.rollout_is=none and no "
          "actor.rollout_mask_threshold")  # fmt: skip
"""What learns without the log-probs of engines."""
CRITIC_WAIT = "wait_critic"
"""The phase in which nothing is left to do but to wait for a critic on devices of its own."""


def assemble(samples: Samples, config: Config) -> TokenBatch:
    """The jagged batch with scores; `loss_mask` says which tokens are learned from.

    Where the critic learns from more tokens than the policy, `value_mask` says from which. Prompts
    of groups are marked to be computed once.
    """
    batch = TokenBatch.from_trajectories(samples.trajectories)
    masking = config.actor_rollout_ref.actor.state_masking
    batch.tokens["loss_mask"] = batch.tokens["policy_mask" if masking else "response_mask"]
    needs_critic = ADVANTAGES[config.algorithm.adv_estimator].needs_critic
    if needs_critic and config.compat.gae_over_all_tokens:
        batch.tokens["value_mask"] = batch.tokens["response_mask"]
    scores = [r.score for r in samples.rewards]
    batch.rows["scores"] = torch.tensor(scores, dtype=torch.float64)
    if samples.greedy_scores:
        batch.rows["greedy_scores"] = torch.tensor(samples.greedy_scores, dtype=torch.float64)
    if config.trainer.share_prompts:
        share_prompts(batch)
    return batch


def add_advantages(batch: TokenBatch, config: Config, kl_controller: KLController) -> Metrics:
    """From scores (shaped, and less KL in the reward) to columns `advantages` and `returns`."""
    algorithm, mask = config.algorithm, batch.tokens["loss_mask"]
    scores, metrics = shaped_scores(batch, config)
    rewards = outcome_to_tokens(scores, mask, batch.offsets)
    if config.kl_in_reward:
        rewards, observed = subtract_kl(rewards, batch, algorithm.kl_penalty, kl_controller)
        metrics |= observed
    estimate = ADVANTAGES[algorithm.adv_estimator].compute(
        AdvantageInputs(
            token_rewards=rewards,
            policy_mask=mask,
            offsets=batch.offsets,
            values=batch.tokens.get("values"),
            group_ids=batch.columns["group"],
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_by_std=algorithm.norm_adv_by_std_in_grpo,
            greedy_scores=batch.rows.get("greedy_scores"),
            gae_mask=batch.tokens.get("value_mask"),
            whiten_mask=(
                batch.tokens["response_mask"] if config.compat.whiten_over_all_tokens else None
            ),
        )
    )
    advantages, share = clip_advantages(estimate.advantages, mask, algorithm.adv_clip)
    batch.tokens |= {"advantages": advantages.float(), "returns": estimate.returns.float()}
    if algorithm.adv_clip is not None:
        metrics["critic/advantages/clip_fraction"] = float(share)
    return metrics


def shaped_scores(batch: TokenBatch, config: Config) -> tuple[Tensor, Metrics]:
    """Scores less the penalty on over-long trajectories, (num_seqs,), and what it took."""
    shaping, scores = config.algorithm.overlong_buffer, batch.rows["scores"]
    if not shaping.enable:
        return scores, {}
    lengths = segment_sum(batch.tokens["policy_mask"].long(), batch.offsets)
    penalty = overlong_penalty(
        lengths, config.overlong_max_length, config.overlong_length, shaping.penalty_factor
    )
    return scores - penalty, {
        "reward/overlong_penalty": float(penalty.mean()),
        "reward/overlong_share": float((penalty > 0).float().mean()),
    }


def subtract_kl(
    rewards: Tensor, batch: TokenBatch, kind: str, controller: KLController
) -> tuple[Tensor, Metrics]:
    """Rewards (num_tokens,) less KL to the reference; the controller then follows that KL."""
    mask = batch.tokens["loss_mask"]
    pair = (batch.tokens["old_log_probs"], batch.tokens["ref_log_probs"])
    kl = float(mean_sequence_kl(*pair, mask, batch.offsets, kind))
    lowered = apply_kl_in_reward(rewards, *pair, mask, controller.value, kind)
    metrics = {"critic/kl": kl, "critic/kl_coef": controller.value}
    controller.update(kl, len(batch))
    return lowered, metrics


def token_signals(batch: TokenBatch, config: Config) -> list[Signals]:
    """What is known so far of each sequence's tokens, where they are learned from.

    Log-probs of the engine are not repeated as the trainer's. `rollout_weights` exist where a
    correction for the engine is asked for.
    """
    tokens, mask = batch.tokens, batch.tokens["loss_mask"]
    found = {name: tokens[name] for name in SIGNALS if name in tokens}
    if config.old_log_probs == "engine":
        found.pop("old_log_probs", None)
    actor, old = config.actor_rollout_ref.actor, found.get("old_log_probs")
    if old is not None and (actor.rollout_is != "none" or actor.rollout_mask_threshold is not None):
        rollout = torch.where(tokens["policy_mask"], tokens["rollout_log_probs"], old)
        ids, weights = sequence_ids(batch.offsets), torch.zeros(batch.num_tokens)
        weights[mask] = rollout_correction(actor, old[mask], rollout[mask], ids[mask])
        found["rollout_weights"] = weights
    known = {name: column.where(mask, torch.nan).numpy() for name, column in found.items()}
    starts = batch.offsets.tolist()
    return [{n: c[start:end] for n, c in known.items()} for start, end in pairwise(starts)]


def mini_batches(
    batch: TokenBatch, config: Config, size: int, epochs: int, step: int
) -> list[TokenBatch]:
    """Shuffled mini-batches of `size` sequences, in an order of seed and step alone.

    With `trainer.keep_groups` it is groups that are shuffled, and what they hold is cut by `size`.

    Each has the weight of every token in its loss: `loss_weights` are the policy's;
    `value_weights`, the critic's, exist where `value_mask` does.
    """
    order = np.random.default_rng((config.trainer.seed, step))
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    names = batch.columns["group"] if config.trainer.keep_groups else range(len(batch))
    units: dict[str | int, list[int]] = {}
    for index, name in enumerate(names):
        units.setdefault(name, []).append(index)
    drawn, chosen = list(units.values()), []
    for _ in range(epochs):
        shuffled = [i for unit in order.permutation(len(drawn)).tolist() for i in drawn[unit]]
        for start in range(0, len(shuffled), size):
            mini = batch.select(shuffled[start : start + size])
            for name in ("loss", "value"):
                if f"{name}_mask" in mini.tokens:
                    mini.tokens[f"{name}_weights"] = loss_weights(
                        mini.tokens[f"{name}_mask"], mini.offsets, mode,
                        float(config.max_policy_tokens),
                    )  # fmt: skip
            chosen.append(mini)
    return chosen


def drop_zero_advantages(mini_batch: TokenBatch) -> TokenBatch:
    """The sequences that have a non-zero advantage; the token weights stay those of the whole."""
    has_any = [bool(a.any()) for a in mini_batch.sequences("advantages")]
    return mini_batch.select([i for i, has in enumerate(has_any) if has])


def require_engine_log_probs(batch: TokenBatch) -> None:
    """Raise ConfigError where the engine told NaN, no log-probs: no update comes of that."""
    found = batch.tokens["rollout_log_probs"]
    if not bool(found[batch.tokens["policy_mask"]].isfinite().all()):
        got = "an engine that does not tell the log-probs of what it samples"
        expected = "those of each token, for old_log_probs=engine, rollout_is and rollout_mask"
        raise ConfigError(
            explain("actor_rollout_ref.rollout.name", got, expected, NO_LOG_PROBS_FIX)
        )


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
    def estimator(self) -> AdvantageEstimator:
        """The row of the estimator in the registry."""
        return ADVANTAGES[self.config.algorithm.adv_estimator]

    def compute_log_probs(self, batch: TokenBatch) -> None:
        """Old and reference log-probs, where an algorithm needs them.

        With a single update per step the old policy is the updating one and needs no pass: the
        ratio is exp(log_prob - log_prob.detach()). Nor do the engine's, where they are the old.
        """
        if self.config.reads_engine_log_probs:
            require_engine_log_probs(batch)
        if self.config.old_log_probs == "engine":
            batch.tokens["old_log_probs"] = batch.tokens["rollout_log_probs"]
        elif self.config.updates_per_step > 1 or self.config.kl_in_reward:
            batch.tokens["old_log_probs"] = self.ranks.log_probs(batch)
            self.work.add_forward("old_log_prob", self.work.policy, batch)
        if self.config.needs_reference:
            batch.tokens["ref_log_probs"] = self.ranks.ref_log_probs(batch)
            self.work.add_forward("old_log_prob", self.work.reference, batch)

    @property
    def has_separate_critic(self) -> bool:
        """A critic on devices of its own works while the actor does."""
        return self.ranks.has_own_critic and self.estimator.needs_critic

    def compute_log_probs_and_values(self, batch: TokenBatch, timings: Timings) -> None:
        """Log-probs, and the critic's view of the states for estimators that ask for it."""
        begun = self.ranks.begin_values(batch) if self.has_separate_critic else None
        with timings.phase("old_log_prob"):
            self.compute_log_probs(batch)
        with timings.phase("values" if begun is None else CRITIC_WAIT):
            if self.estimator.needs_critic:
                batch.tokens["values"] = (begun or self.ranks.begin_values(batch))()
                self.work.add_forward("values", self.work.critic, batch)
        if begun is not None:
            timings.record_peak("values", self.ranks.take_critic_peak_memory())

    def update(self, batch: TokenBatch, step: int, timings: Timings) -> Metrics:
        """The epochs of critic and actor over the batch; neither needs what the other learns."""
        if not self.has_separate_critic:
            with timings.phase("update_critic"):
                found = self.begin_critic_update(batch, step)()
            with timings.phase("update_actor"):
                return mean_by_key(found) | self.update_actor(batch, step)
        answer = self.begin_critic_update(batch, step)
        with timings.phase("update_actor"):
            metrics = self.update_actor(batch, step)
        with timings.phase(CRITIC_WAIT):
            found = answer()
        timings.record_peak("update_critic", self.ranks.take_critic_peak_memory())
        return mean_by_key(found) | metrics

    def begin_critic_update(self, batch: TokenBatch, step: int) -> Callable[[], list[Metrics]]:
        """Begin the value function's epochs over the batch, if there is one; the answer waits."""
        if not self.estimator.needs_critic:
            return list
        critic = self.config.critic
        size = critic.ppo_mini_batch_size or self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        minis = mini_batches(batch, self.config, size, critic.ppo_epochs, step)
        for mini in minis:
            self.work.add_update("update_critic", self.work.critic, mini)
        return self.ranks.begin_update_critic(minis)

    def update_actor(self, batch: TokenBatch, step: int) -> Metrics:
        """The policy's epochs over the batch; none while the critic warms up."""
        if step <= self.config.trainer.critic_warmup and self.estimator.needs_critic:
            return {}
        actor = self.config.actor_rollout_ref.actor
        size, epochs = actor.ppo_mini_batch_size, actor.ppo_epochs
        minis = mini_batches(batch, self.config, size, epochs, step)
        if not self.config.needs_every_trajectory:
            minis = [drop_zero_advantages(mini) for mini in minis]
        for mini in minis:
            self.work.add_update("update_actor", self.work.policy, mini)
        found = [self.ranks.update_actor(mini) for mini in minis]
        # Without any trajectory to learn from, an update has no entropy and no gradient to report.
        return mean_by_key([row for mini, row in zip(minis, found, strict=True) if len(mini)])

    def measure_drift(self, batch: TokenBatch) -> Metrics:
        """What the updates did to the log-probs of some correct trajectories, for the guard."""
        guard = self.config.trainer.guard
        again = correct_trajectories(batch, guard.drift_trajectories if guard.enable else 0)
        if not len(again):
            return {}
        after = self.ranks.log_probs(again)
        drift, shift = drift_and_shift(again, after)
        return {DRIFT: drift, SHIFT: shift}
