"""The policy on a training rank: log-probs of a batch, and one optimizer step on a mini-batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.batch import TokenBatch
from verl.config import ActorConfig
from verl.core_algos.chosen import policy_loss
from verl.core_algos.jagged import sequence_ids
from verl.core_algos.kl import kl_penalty
from verl.core_algos.losses import weighted_sum
from verl.core_algos.mismatch import importance_weights
from verl.core_algos.policy_losses import (
    PolicyDiagnostics,
    PolicyLossInputs,
    likelihood_loss,
)
from verl.packing import computed_token_share
from verl.training.budgets import TokenBudgets
from verl.training.devices import to_device
from verl.training.fsdp import MAX, FsdpModel, all_reduced
from verl.training.models import PackedInputs
from verl.types import Metrics

logger = logging.getLogger(__name__)


def loss_mask(batch: TokenBatch) -> Tensor:
    """Return the column `loss_mask`, or without it `policy_mask`: (num_tokens,) bool."""
    name = "loss_mask" if "loss_mask" in batch.tokens else "policy_mask"
    return batch.tokens[name].bool()


def pack_inputs(model: FsdpModel, micro_batch: TokenBatch) -> PackedInputs:
    """Pack a micro-batch for a forward pass whose targets are the tokens in the loss."""
    return model.pack(micro_batch, loss_mask(micro_batch))


def compute_at_targets(
    model: FsdpModel, batch: TokenBatch, budget: int, forward: Callable[[PackedInputs], Tensor]
) -> Tensor:
    """Compute `forward` for each token in the loss, 0 elsewhere: (num_tokens,) float32."""
    positions, outputs = [], []
    for indices, micro_batch in model.micro_batches(batch, budget):
        inputs = pack_inputs(model, micro_batch)
        outputs.append(forward(inputs))
        positions.append(batch.positions(indices)[inputs.target_positions])
    model.reshard()
    result = torch.zeros(batch.num_tokens)
    # One copy for all micro-batches: each copy waits for the device.
    result[torch.cat(positions)] = torch.cat(outputs).cpu()
    return result


def apply_update(
    model: FsdpModel, name: str, mini_batch: TokenBatch,
    micro_batches: Sequence[tuple[list[int], TokenBatch]], sum_names: Sequence[str],
    sums: list[Tensor],
) -> Metrics:  # fmt: skip
    """Take an optimizer step with the accumulated gradient; return metrics over all ranks.

    `sums` has a tensor per micro-batch of this rank, still on the device, whose elements are named
    by `sum_names`; the first is the loss. Losses are reported as they are, all other sums divided
    by the sum named `weight`. Metrics are prefixed by the model's `name`.
    """
    total = all_reduced(torch.stack(sums).sum(0), model.device) / model.options.ranks_per_shard
    is_finite = bool(total.isfinite().all())
    if not is_finite:
        losses = torch.stack(sums)[:, 0].tolist()
        for loss, (_, micro_batch) in zip(losses, micro_batches, strict=True):
            if not math.isfinite(loss):
                groups = micro_batch.columns.get("group")
                logger.warning("%s loss %s on groups %s", name, loss, groups)
    step = model.step(is_finite=is_finite)
    if step.is_faulty:
        logger.warning("%s update skipped: gradient norm %s on groups %s", name, step.grad_norm,
                       mini_batch.columns.get("group"))  # fmt: skip
    totals = dict(zip(sum_names, total.tolist(), strict=True))
    weight = max(totals.pop("weight"), 1e-12)
    means = {key: x if key.endswith("loss") else x / weight for key, x in totals.items()}
    return {
        **{f"{name}/{key}": x for key, x in means.items()},
        **{f"{name}/{key}": x for key, x in step.metrics().items()},
        f"{name}/num_micro_batches": float(len(micro_batches)),
        f"{name}/computed_token_share": computed_token_share([micro for _, micro in micro_batches]),
    }


def rollout_correction(
    config: ActorConfig, old_log_probs: Tensor, rollout_log_probs: Tensor, sequence_ids: Tensor
) -> Tensor:
    """Compute the importance weights that the options ask for, (num_tokens,)."""
    chosen = config.correction
    return importance_weights(
        old_log_probs, rollout_log_probs, sequence_ids, chosen.rollout_is,
        chosen.rollout_is_threshold, chosen.rollout_mask_threshold,
        mask_level=chosen.rollout_mask, mask_floor=chosen.rollout_mask_floor,
    )  # fmt: skip


@dataclass
class Actor:
    """A policy, or the frozen reference policy."""

    model: FsdpModel
    config: ActorConfig
    budgets: TokenBudgets
    temperature: float = 1.0
    """The temperature that tokens were sampled at."""

    @torch.no_grad()
    def log_probs(self, batch: TokenBatch, temperature: float | None = None) -> Tensor:
        """Compute the log-prob of each token in the loss, 0 elsewhere: (num_tokens,) float32."""
        temperature = self.temperature if temperature is None else temperature
        return compute_at_targets(
            self.model, batch, self.budgets.inference,
            lambda inputs: self.model.forward(inputs, temperature)[0],
        )  # fmt: skip

    def update(self, mini_batch: TokenBatch) -> Metrics:
        """Take an optimizer step on this rank's share of a mini-batch; return global metrics.

        Needs the token columns `advantages`, `loss_weights` (computed over all ranks) and, if KL
        is in the loss, `ref_log_probs`. Without `old_log_probs` the current policy is the old one.
        """
        micro_batches = self.model.micro_batches(mini_batch, self.budgets.update)
        sums, mismatches = [], []
        for number, (_, micro_batch) in enumerate(micro_batches, 1):
            inputs = pack_inputs(self.model, micro_batch)
            loss, micro_sums, mismatch = self._loss(micro_batch, inputs)
            self.model.backward(loss, is_last=number == len(micro_batches))
            sums.append(micro_sums)
            mismatches.append(mismatch)
        metrics = apply_update(self.model, "actor", mini_batch, micro_batches, _SUMS, sums)
        if "rollout_log_probs" in mini_batch.tokens:
            largest = torch.stack(mismatches).amax(0, keepdim=True)
            largest = all_reduced(largest, self.model.device, MAX)
            metrics["actor/rollout_mismatch_max"] = float(largest)
        square = metrics.pop(f"actor/{_SQUARE}")
        mean = metrics["actor/rollout_weight"]
        metrics["actor/rollout_ess"] = mean**2 / square if square else 0.0
        return metrics

    def _loss(self, micro: TokenBatch, inputs: PackedInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Compute a micro-batch's share of the loss, its sums `_SUMS`, and its largest mismatch."""
        config = self.config
        with_entropy = config.entropy_coeff != 0.0
        log_probs, entropy = self.model.forward(inputs, self.temperature, with_entropy)
        columns = TargetColumns(micro, inputs)
        weights = columns["loss_weights"]
        zero = weights.new_zeros(())
        old = columns["old_log_probs"] if "old_log_probs" in micro.tokens else log_probs.detach()
        rollout = columns.rollout_log_probs(old)
        losses, diagnostics, corrections = self._policy_losses(log_probs, old, rollout, columns)
        pg_loss = weighted_sum(losses, weights)
        entropy = weighted_sum(entropy, weights)
        kl_loss = llds_loss = zero
        if config.use_kl_loss and config.kl_loss_coef > 0:
            kl = kl_penalty(log_probs, columns["ref_log_probs"], config.kl_loss_type)
            kl_loss = weighted_sum(kl, weights)
        if config.llds_coef > 0:
            preserved = columns["advantages"] >= 0
            lost = likelihood_loss(log_probs, old, preserved, columns.turns)
            llds_loss = weighted_sum(lost, weights)
        loss = pg_loss + config.kl_loss_coef * kl_loss - config.entropy_coeff * entropy
        loss = loss + config.llds_coef * llds_loss
        mismatch = (old - rollout).abs()
        per_token = (
            diagnostics.approx_kl, diagnostics.clipped, diagnostics.dual_clipped, mismatch,
            kl_penalty(rollout, old, "k3"), corrections, corrections**2,
            (corrections == 0).to(losses.dtype),
        )  # fmt: skip
        sums = torch.stack([
            loss, pg_loss, kl_loss, llds_loss, entropy,
            *(weighted_sum(x, weights) for x in per_token), weights.sum(),
        ]).detach()  # fmt: skip
        return loss, sums, mismatch.max() if len(mismatch) else zero

    def _policy_losses(
        self, log_probs: Tensor, old: Tensor, rollout: Tensor, columns: TargetColumns
    ) -> tuple[Tensor, PolicyDiagnostics, Tensor]:
        """Return the corrected policy loss per token, diagnostics, and the correction's weights."""
        config = self.config
        high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
        ids = columns.sequence_ids
        inputs = PolicyLossInputs(
            log_probs, old, columns["advantages"], ids, config.clip_ratio, high, config.clip_ratio_c
        )
        losses, diagnostics = policy_loss(config.policy_loss)(inputs)
        weights = rollout_correction(config, old, rollout, ids)
        return losses * weights, diagnostics, weights


_SQUARE = "rollout_weight_squared"
_SUMS = (
    "loss", "pg_loss", "kl_loss", "llds_loss", "entropy",
    "ppo_kl", "clip_fraction", "dual_clip_fraction", "rollout_mismatch", "rollout_kl",
    "rollout_weight", _SQUARE, "rollout_masked", "weight",
)  # fmt: skip
"""Names of the sums over tokens that `Actor._loss` returns, weighted by the loss weights."""


@dataclass(frozen=True)
class TargetColumns:
    """Token columns of a micro-batch at a forward's targets, (num_targets,) on its device."""

    micro_batch: TokenBatch
    inputs: PackedInputs

    def __getitem__(self, name: str) -> Tensor:
        return self._at_targets(self.micro_batch.tokens[name])

    def _at_targets(self, column: Tensor) -> Tensor:
        """Return the values of a column (num_tokens,) on the host at the targets."""
        return to_device(column[self.inputs.target_positions], self.inputs.targets.device)

    @property
    def sequence_ids(self) -> Tensor:
        """The index of each target's sequence in the micro-batch."""
        return self._at_targets(sequence_ids(self.micro_batch.offsets))

    @property
    def turns(self) -> Tensor:
        """The number of each target's turn: a run of adjacent tokens, ended by an observation."""
        breaks = self.inputs.target_positions.diff(prepend=self.inputs.target_positions[:1]) > 1
        return to_device(breaks.long().cumsum(0), self.inputs.targets.device)

    def rollout_log_probs(self, old_log_probs: Tensor) -> Tensor:
        """Return the engine's log-probs, and `old_log_probs` where it sampled or reported none.

        Both belong to the weights that sampled, however many updates the step has made since.
        """
        if not {"rollout_log_probs", "policy_mask"} <= self.micro_batch.tokens.keys():
            return old_log_probs
        return torch.where(self["policy_mask"].bool(), self["rollout_log_probs"], old_log_probs)
