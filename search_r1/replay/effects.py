"""What a replayed trajectory would have been to the run: its advantage, and its gradient.

Both are those of the recorded step with the one trajectory put in the place of the other. The
gradient is that of the policy loss where the weights that sampled are the ones being trained.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from verl.config import Config
from verl.core_algos.advantages import ADVANTAGES
from verl.core_algos.kl import FixedKLController
from verl.core_algos.losses import loss_weights, weighted_sum
from verl.core_algos.policy_losses import POLICY_LOSSES, PolicyLossInputs
from verl.data.trajectories import Recorded
from verl.trainer.collection import Samples
from verl.trainer.learning import add_advantages, assemble
from verl.training.actor import Columns, loss_mask
from verl.training.devices import resolve_device
from verl.training.models import LogProbModel, PackedInputs, load_causal_lm
from verl.types import TokenBatch


@dataclass(frozen=True)
class Gradients:
    """Of the recorded trajectory and of the replayed one; cosines are null beside a zero."""

    norm_recorded: float
    norm_replayed: float
    norm_of_change: float
    cosine: float | None
    """Of the two."""
    cosine_of_change: float | None
    """Of the change with the recorded one: below 0 where it takes away from it."""


def without_advantage(config: Config) -> str:
    """What cannot be told from the record alone; empty where all of the advantage can."""
    estimator = config.algorithm.adv_estimator
    if ADVANTAGES[estimator].needs_critic:
        return f"no advantage: {estimator} needs the critic's values, which are not recorded"
    return "the advantage is that of the scores, without the KL in the reward" * config.kl_in_reward


def learned(config: Config, step: Sequence[Recorded], place: int, one: Recorded) -> TokenBatch:
    """The trajectory at `place` of its step as the run would learn from it, be it another `one`.

    One sequence, with `advantages` and its `loss_weights` within all that the step sampled.
    """
    rows = [one if i == place else row for i, row in enumerate(step)]
    greedy = [row.greedy_score for row in rows if row.greedy_score is not None]
    config = copy.deepcopy(config)
    config.trainer.share_prompts, config.algorithm.kl_ctrl.kl_coef = False, 0.0
    samples = Samples([row.trajectory for row in rows], [row.reward for row in rows], greedy)
    batch = assemble(samples, config)
    add_advantages(batch, config, FixedKLController(0.0))
    batch.tokens["loss_weights"] = loss_weights(
        batch.tokens["loss_mask"], batch.offsets, config.actor_rollout_ref.actor.loss_agg_mode,
        float(config.max_policy_tokens),
    )  # fmt: skip
    return batch.select([place])


def advantage(batch: TokenBatch) -> float:
    """The mean over the tokens that are learned from."""
    found = batch.tokens["advantages"][loss_mask(batch)]
    return float(found.mean()) if len(found) else math.nan


def gradients(config: Config, folder: Path, recorded: TokenBatch, other: TokenBatch) -> Gradients:
    """The two at the weights of a Hugging Face folder, computed in float32."""
    device = resolve_device(config.trainer.device)
    model = LogProbModel(load_causal_lm(str(folder)))
    model.to(device)
    before, after = (_gradient(config, model, one, device) for one in (recorded, other))
    change = [b - a for a, b in zip(before, after, strict=True)]
    norms = [math.sqrt(_dot(one, one)) for one in (before, after, change)]
    return Gradients(
        norms[0], norms[1], norms[2],
        _cosine(_dot(before, after), norms[0] * norms[1]),
        _cosine(_dot(before, change), norms[0] * norms[2]),
    )  # fmt: skip


def _gradient(
    config: Config, model: LogProbModel, batch: TokenBatch, device: torch.device
) -> list[Tensor]:
    """Of the sequence's share of the policy loss, by parameter."""
    actor = config.actor_rollout_ref.actor
    inputs = PackedInputs.of(batch, loss_mask(batch), device)
    columns = Columns(batch, inputs)
    log_probs, _ = model(inputs, config.actor_rollout_ref.rollout.temperature or 1.0)
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    given = PolicyLossInputs(
        log_probs, log_probs.detach(), columns["advantages"], columns.sequence_ids,
        actor.clip_ratio, high, actor.clip_ratio_c,
    )  # fmt: skip
    losses, _ = POLICY_LOSSES[actor.policy_loss](given)
    model.zero_grad(set_to_none=True)
    weighted_sum(losses, columns["loss_weights"]).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def _dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Summed in float64."""
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(one, other, strict=True))


def _cosine(product: float, norms: float) -> float | None:
    return product / norms if norms else None
