"""From scored samples to what actor and critic learn from: the batch, advantages, mini-batches."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from verl.config import Config
from verl.core_algos.advantages import ADVANTAGES, AdvantageInputs
from verl.core_algos.jagged import outcome_to_tokens, segment_sum
from verl.core_algos.kl import KLController, apply_kl_in_reward, mean_sequence_kl
from verl.core_algos.losses import loss_weights
from verl.core_algos.shaping import clip_advantages, overlong_penalty
from verl.trainer.collection import Samples
from verl.types import Metrics, TokenBatch


def assemble(samples: Samples, config: Config) -> TokenBatch:
    """The jagged batch with scores; `loss_mask` says which tokens are learned from.

    Where the critic learns from more tokens than the policy, `value_mask` says from which.
    """
    batch = TokenBatch.from_trajectories(samples.trajectories)
    masking = config.actor_rollout_ref.actor.state_masking
    batch.tokens["loss_mask"] = batch.tokens["policy_mask" if masking else "response_mask"]
    needs_critic = ADVANTAGES[config.algorithm.adv_estimator].needs_critic
    if needs_critic and config.compat.gae_over_all_tokens:
        batch.tokens["value_mask"] = batch.tokens["response_mask"]
    scores = [r.score for r in samples.rewards]
    batch.rows["scores"] = torch.tensor(scores, dtype=torch.float32)
    if samples.greedy_scores:
        batch.rows["greedy_scores"] = torch.tensor(samples.greedy_scores, dtype=torch.float32)
    return batch


def add_advantages(batch: TokenBatch, config: Config, kl_controller: KLController) -> Metrics:
    """From scores (shaped, and less KL in the reward) to columns `advantages` and `returns`."""
    algorithm, mask = config.algorithm, batch.tokens["loss_mask"]
    scores, metrics = shaped_scores(batch, config)
    rewards = outcome_to_tokens(scores, mask, batch.offsets)
    if config.kl_in_reward:
        rewards, observed = less_kl(rewards, batch, algorithm.kl_penalty, kl_controller)
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
    batch.tokens |= {"advantages": advantages, "returns": estimate.returns}
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


def less_kl(
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


def mini_batches(
    batch: TokenBatch, config: Config, size: int, epochs: int, order: np.random.Generator
) -> list[TokenBatch]:
    """Shuffled mini-batches of `size` sequences, with the weight of each token in its loss.

    `loss_weights` are the policy's; `value_weights`, the critic's, exist where `value_mask` does.
    """
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    norm_length = float(config.max_policy_tokens)
    chosen = []
    for _ in range(epochs):
        shuffled = order.permutation(len(batch)).tolist()
        for start in range(0, len(shuffled), size):
            mini = batch.select(shuffled[start : start + size])
            for name in ("loss", "value"):
                if f"{name}_mask" in mini.tokens:
                    mini.tokens[f"{name}_weights"] = loss_weights(
                        mini.tokens[f"{name}_mask"], mini.offsets, mode, norm_length
                    )
            chosen.append(mini)
    return chosen


def with_gradient(mini_batch: TokenBatch) -> TokenBatch:
    """The sequences that have a non-zero advantage; the token weights stay those of the whole."""
    has_any = [bool(a.any()) for a in mini_batch.sequences("advantages")]
    return mini_batch.select([i for i, has in enumerate(has_any) if has])
