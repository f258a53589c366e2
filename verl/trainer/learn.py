"""The part of a step after sampling: batch, log-probs and values, advantages, updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl.batch import TokenBatch
from verl.core_algos.advantages import DIVIDED, AdvantageEstimator, AdvantageInputs, Gae
from verl.core_algos.chosen import advantage_estimator
from verl.core_algos.groups import Groups
from verl.core_algos.jagged import ROUNDING, outcome_to_tokens, segment_sum, sequence_ids
from verl.core_algos.kl import KLController, apply_kl_in_reward, mean_sequence_kl
from verl.core_algos.losses import loss_weights
from verl.core_algos.shaping import overlong_penalty
from verl.errors import ConfigError, explain
from verl.monitor.performance import Timings
from verl.packing import group_members, share_prompts
from verl.trainer.collect import Samples, has_gate
from verl.trainer.hooks import Stateful
from verl.trainer.metrics import mean_by_key
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.checkpoint.folders import RunState
    from verl.config import Config
    from verl.trainer.ranks import TrainerRanks

NO_LOG_PROBS_FIX = (
    "actor_rollout_ref.actor.old_log_probs=recompute, actor.rollout_is=none and no "
    "actor.rollout_mask_threshold"
)
"""Options that need no log-probs of the engines, for error messages."""


def assemble(samples: Samples, config: Config) -> TokenBatch:
    """Build the jagged batch of a step from its samples, with scores and masks.

    `loss_mask` marks the tokens that are trained on. `value_mask` exists if the critic is trained
    on more tokens than the policy, and marks them. With `trainer.share_prompts`, what dialogues of
    a group begin with alike is marked to be computed once.
    """
    batch = TokenBatch.from_trajectories(samples.trajectories)
    masking = config.actor_rollout_ref.actor.state_masking
    batch.tokens["loss_mask"] = batch.tokens["policy_mask" if masking else "response_mask"]
    needs_critic = advantage_estimator(config.algorithm.adv_estimator).needs_critic
    if needs_critic and config.is_as_original:
        batch.tokens["value_mask"] = batch.tokens["response_mask"]
    scores = [r.score for r in samples.rewards]
    batch.rows["scores"] = torch.tensor(scores, dtype=torch.float64)
    if any(reward.is_right is not None for reward in samples.rewards):
        wrong = samples.all_wrong_groups()
        batch.rows["all_wrong"] = torch.tensor([g in wrong for g in batch.columns["group"]])
    if config.trainer.share_prompts:
        share_prompts(batch)
    return batch


def add_advantages(batch: TokenBatch, config: Config, kl_controller: KLController) -> Metrics:
    """Compute the `advantages` and `returns` columns from the (shaped, KL-penalised) scores."""
    algorithm, mask = config.algorithm, batch.tokens["loss_mask"]
    scores, metrics = shaped_scores(batch, config)
    if "all_wrong" in batch.rows and has_gate(config):
        scores = scores.masked_fill(batch.rows["all_wrong"], 0.0)
    rewards = outcome_to_tokens(scores, mask, batch.offsets)
    if config.kl_in_reward:
        outcome = rewards
        rewards, kl_metrics = subtract_kl(rewards, batch, algorithm.kl_penalty, kl_controller)
        metrics |= kl_metrics
        if algorithm.adv_estimator in DIVIDED and algorithm.norm_adv_by_std_in_grpo:
            rewards = torch.where(has_signal(batch, scores), rewards, outcome)
    whiten_mask = batch.tokens["response_mask"] if config.is_as_original else None
    gae = Gae(algorithm.lam, batch.tokens.get("value_mask"), whiten_mask)
    estimate = advantage_estimator(algorithm.adv_estimator).compute(
        AdvantageInputs(
            token_rewards=rewards,
            policy_mask=mask,
            offsets=batch.offsets,
            values=batch.tokens.get("values"),
            group_ids=batch.columns["group"],
            gamma=algorithm.gamma,
            norm_by_std=algorithm.norm_adv_by_std_in_grpo,
            gae=gae,
        )
    )
    advantages, returns = estimate.advantages.float(), estimate.returns.float()
    if "all_wrong" in batch.rows and has_gate(config) and not config.kl_in_reward:
        # Whitening, as of `reinforce_plus_plus_baseline`, would shift closed groups from 0.
        closed = batch.rows["all_wrong"][sequence_ids(batch.offsets)]
        advantages, returns = advantages.masked_fill(closed, 0), returns.masked_fill(closed, 0)
    batch.tokens |= {"advantages": advantages, "returns": returns}
    return metrics


def has_signal(batch: TokenBatch, scores: Tensor) -> Tensor:
    """Whether the scores (num_seqs,) in each token's group differ, (num_tokens,) bool.

    In other groups KL in the reward, divided by its own deviation, would be as strong as a signal
    of the outcome, whatever its coefficient is.
    """
    groups = Groups.of(batch.columns["group"], batch.tokens["loss_mask"], batch.offsets)
    return (groups.std(scores.double()) > ROUNDING)[sequence_ids(batch.offsets)]


def shaped_scores(batch: TokenBatch, config: Config) -> tuple[Tensor, Metrics]:
    """Return scores (num_seqs,) minus the penalty on over-long trajectories, and its metrics."""
    shaping, scores = config.algorithm.overlong_buffer, batch.rows["scores"]
    if not shaping.enable:
        return scores, {}
    lengths = segment_sum(batch.tokens["policy_mask"].long(), batch.offsets)
    longest = config.max_policy_tokens
    buffer = max(1, longest // 5)  # as in DAPO: 4,096 of 20,480
    penalty = overlong_penalty(lengths, longest, buffer, shaping.penalty_factor)
    return scores - penalty, {
        "reward/overlong_penalty": float(penalty.mean()),
        "reward/overlong_share": float((penalty > 0).float().mean()),
    }


def subtract_kl(
    rewards: Tensor, batch: TokenBatch, kind: str, controller: KLController
) -> tuple[Tensor, Metrics]:
    """Subtract the KL to the reference from rewards (num_tokens,), then adapt its coefficient."""
    mask = batch.tokens["loss_mask"]
    log_probs = (batch.tokens["old_log_probs"], batch.tokens["ref_log_probs"])
    kl = float(mean_sequence_kl(*log_probs, mask, batch.offsets, kind))
    penalised = apply_kl_in_reward(rewards, *log_probs, mask, controller.value, kind)
    metrics = {"critic/kl": kl, "critic/kl_coef": controller.value}  # before the update
    controller.value = controller.next_value(kl, len(batch))
    return penalised, metrics


def mini_batches(
    batch: TokenBatch, config: Config, size: int, epochs: int, step: int
) -> list[TokenBatch]:
    """Split `epochs` passes over a batch into shuffled mini-batches of `size` sequences.

    The order depends only on seed and step. A group stays together, except where a mini-batch ends,
    so that what its dialogues begin with is computed once. Each mini-batch gets the weight of every
    token in its loss: `loss_weights` and, if there is a `value_mask`, `value_weights` for the
    critic.
    """
    random = np.random.default_rng((config.trainer.seed, step))
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    groups = group_members(batch.columns["group"])
    minis = []
    for _ in range(epochs):
        order = random.permutation(len(groups))
        shuffled = [index for number in order for index in groups[number]]
        for start in range(0, len(shuffled), size):
            mini = batch.select(shuffled[start : start + size])
            for name in ("loss", "value"):
                if f"{name}_mask" in mini.tokens:
                    mini.tokens[f"{name}_weights"] = loss_weights(
                        mini.tokens[f"{name}_mask"], mini.offsets, mode,
                        float(config.max_policy_tokens),
                    )  # fmt: skip
            minis.append(mini)
    return minis


def drop_zero_advantages(mini_batch: TokenBatch) -> TokenBatch:
    """Return the sequences with a non-zero advantage: only these add to the policy loss.

    The token weights stay those of the whole mini-batch.
    """
    advantages = mini_batch.sequences("advantages")
    return mini_batch.select([i for i, a in enumerate(advantages) if bool(a.any())])


def require_engine_log_probs(batch: TokenBatch) -> None:
    """Raise ConfigError if the engine did not report the log-probs of all policy tokens."""
    log_probs = batch.tokens["rollout_log_probs"]
    if bool(log_probs[batch.tokens["policy_mask"]].isfinite().all()):
        return
    got = "an engine that does not report the log-probs of the tokens it samples"
    expected = "a log-prob for each token, for old_log_probs=engine, rollout_is and rollout_mask"
    raise ConfigError(explain("actor_rollout_ref.rollout.name", got, expected, NO_LOG_PROBS_FIX))


Counter = Callable[[str, str, TokenBatch], None]
"""Called with each pass over a batch: the phase, and `policy`, `reference` or `critic`."""


CriticStarter = Callable[[str, Callable[[], Callable[[], Any]], Timings], Callable[[], Any]]
"""Does the critic's work of a phase, which a function starts that returns one that waits for it;
returns a function that waits for the result."""


def at_once(
    phase: str, begin: Callable[[], Callable[[], Any]], timings: Timings
) -> Callable[[], Any]:
    """Do the critic's work before the actor's, as they share ranks; see `CriticStarter`."""
    with timings.phase(phase):
        result = begin()()
    return lambda: result


@dataclass
class Learner(Stateful):
    """Runs the forward passes and updates that the algorithm needs on the ranks."""

    config: Config
    ranks: TrainerRanks
    kl_controller: KLController
    count_pass: Counter = lambda phase, model, batch: None
    start_critic: CriticStarter = at_once

    @property
    def estimator(self) -> AdvantageEstimator:
        """The configured advantage estimator."""
        return advantage_estimator(self.config.algorithm.adv_estimator)

    def compute_log_probs(self, batch: TokenBatch) -> None:
        """Add the old and reference log-probs to the batch, if the algorithm needs them.

        With a single update per step, the old policy is the one being updated and needs no forward
        pass: the ratio is exp(log_prob - log_prob.detach()). Nor is a pass needed if the engine's
        log-probs are used as the old ones.
        """
        if self.config.reads_engine_log_probs:
            require_engine_log_probs(batch)
        if self.config.old_log_probs == "engine":
            batch.tokens["old_log_probs"] = batch.tokens["rollout_log_probs"]
        elif self.config.updates_per_step > 1 or self.config.kl_in_reward:
            batch.tokens["old_log_probs"] = self.ranks.begin_forward("actor", batch)()
            self.count_pass("old_log_prob", "policy", batch)
        if self.config.needs_reference:
            batch.tokens["ref_log_probs"] = self.ranks.begin_forward("reference", batch)()
            self.count_pass("old_log_prob", "reference", batch)

    def prepare(self, batch: TokenBatch, timings: Timings) -> None:
        """Add log-probs and, if the estimator needs a critic, values to the batch."""
        values = self.start_critic("values", lambda: self.begin_values(batch), timings)
        with timings.phase("old_log_prob"):
            self.compute_log_probs(batch)
        if (found := values()) is not None:
            batch.tokens["values"] = found

    def begin_values(self, batch: TokenBatch) -> Callable[[], Tensor | None]:
        """Start computing values, if they are needed; returns a function that waits for them."""
        if not self.estimator.needs_critic:
            return lambda: None
        self.count_pass("values", "critic", batch)
        return self.ranks.begin_forward("critic", batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient of the KL in the reward."""
        return {"kl_coef": self.kl_controller.value}

    def load_checkpoint(self, state: RunState, folder: Path) -> None:
        """Restore the coefficient; the ranks load their own shards."""
        self.kl_controller.value = float(state.kl_coef)

    def update(self, batch: TokenBatch, step: int, timings: Timings) -> Metrics:
        """Update critic and actor on the batch; returns their metrics."""
        begin = partial(self.begin_critic_update, batch, step)
        critic_metrics = self.start_critic("update_critic", begin, timings)
        with timings.phase("update_actor"):
            actor_metrics = self.update_actor(batch, step)
        return mean_by_key(critic_metrics()) | actor_metrics

    def begin_critic_update(self, batch: TokenBatch, step: int) -> Callable[[], list[Metrics]]:
        """Start the critic's epochs, if any; returns a function that waits for their metrics."""
        if not self.estimator.needs_critic:
            return list
        critic = self.config.critic
        size = critic.ppo_mini_batch_size or self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        minis = mini_batches(batch, self.config, size, critic.ppo_epochs, step)
        for mini in minis:
            self.count_pass("update_critic", "critic", mini)
        return self.ranks.begin_updates("critic", minis)

    def update_actor(self, batch: TokenBatch, step: int) -> Metrics:
        """Run the actor's epochs on the batch; none during the critic's warm-up."""
        if step <= self.config.trainer.critic_warmup and self.estimator.needs_critic:
            return {}
        actor = self.config.actor_rollout_ref.actor
        size, epochs = actor.ppo_mini_batch_size, actor.ppo_epochs
        minis = mini_batches(batch, self.config, size, epochs, step)
        if not self.config.needs_every_trajectory:
            minis = [drop_zero_advantages(mini) for mini in minis]
        for mini in minis:
            self.count_pass("update_actor", "policy", mini)
        metrics = [self.ranks.update("actor", mini) for mini in minis]
        # An empty mini-batch is an optimizer step too, but has no entropy or gradient to report.
        return mean_by_key([m for mini, m in zip(minis, metrics, strict=True) if len(mini)])
