"""The policy on training ranks: log-probs of a batch, and one optimizer step on a mini-batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.config import ActorConfig
from verl.core_algos.jagged import sequence_ids
from verl.core_algos.kl import kl_penalty
from verl.core_algos.losses import weighted_sum
from verl.core_algos.mismatch import importance_weights
from verl.core_algos.policy_losses import (
    POLICY_LOSSES,
    PolicyDiagnostics,
    PolicyLossInputs,
    likelihood_loss,
)
from verl.training.budgets import TokenBudgets
from verl.training.devices import sent
from verl.training.fsdp import MAX, FsdpModel, reduced
from verl.training.models import PackedInputs
from verl.types import Metrics, TokenBatch

logger = logging.getLogger(__name__)


def loss_mask(batch: TokenBatch) -> Tensor:
    """(num_tokens,) bool: the tokens that are learned from; the policy's unless said otherwise."""
    name = "loss_mask" if "loss_mask" in batch.tokens else "policy_mask"
    return batch.tokens[name].bool()


def inputs_of(engine: FsdpModel, micro: TokenBatch) -> PackedInputs:
    """A forward that is asked for the tokens in the loss."""
    return PackedInputs.of(micro, loss_mask(micro), engine.device, engine.options.sp_group)


def at_targets(
    engine: FsdpModel, batch: TokenBatch, budget: int, forward: Callable[[PackedInputs], Tensor]
) -> Tensor:
    """What `forward` answers for each token in the loss, (num_tokens,) float32; else 0."""
    result, places, found = torch.zeros(batch.num_tokens), [], []
    for indices, micro in engine.micro_batches(batch, budget):
        inputs = inputs_of(engine, micro)
        found.append(forward(inputs))
        places.append(batch.positions(indices)[inputs.target_positions])
    engine.reshard()
    result[torch.cat(places)] = torch.cat(found).cpu()  # once: each copy would wait for the device
    return result


def apply_update(
    engine: FsdpModel, model: str, mini_batch: TokenBatch,
    micros: Sequence[tuple[list[int], TokenBatch]], names: Sequence[str], rows: list[Tensor],
) -> Metrics:  # fmt: skip
    """One optimizer step with the gradient at hand; metrics are over all ranks.

    `rows` are the sums of this rank's `micros`, by `names`, the loss first, still on the device.
    Losses are reported as they are, others as means over the tokens seen, by their `weight`.
    """
    total = reduced(torch.stack(rows).sum(0), engine.device) / engine.num_together
    is_finite = bool(total.isfinite().all())
    if not is_finite:
        for row, (_, micro) in zip(torch.stack(rows)[:, 0].tolist(), micros, strict=True):
            if not math.isfinite(row):
                groups = micro.columns.get("group")
                logger.warning("%s loss %s on groups %s", model, row, groups)
    step = engine.step(is_finite=is_finite)
    if step.is_faulty:
        logger.warning("%s update skipped: gradient norm %s on groups %s", model, step.grad_norm,
                       mini_batch.columns.get("group"))  # fmt: skip
    seen = dict(zip(names, total.tolist(), strict=True))
    weight = max(seen.pop("weight"), 1e-12)
    means = {name: x if name.endswith("loss") else x / weight for name, x in seen.items()}
    if spent := engine.take_compile_seconds():
        means["compile_s"] = spent
    return {
        **{f"{model}/{name}": x for name, x in means.items()},
        **step.metrics(model),
        f"{model}/num_micro_batches": float(len(micros)),
    }


def correction(
    config: ActorConfig, old_log_probs: Tensor, rollout_log_probs: Tensor, sequence_ids: Tensor
) -> Tensor:
    """The importance weights that the options ask for, (num_tokens,)."""
    return importance_weights(
        old_log_probs, rollout_log_probs, sequence_ids, config.rollout_is,
        config.rollout_is_threshold, config.rollout_mask_threshold, floor=config.rollout_is_floor,
        mask_level=config.rollout_mask, mask_floor=config.rollout_mask_floor,
    )  # fmt: skip


@dataclass
class Actor:
    """A policy in an engine; the reference is the same thing, frozen."""

    engine: FsdpModel
    config: ActorConfig
    budgets: TokenBudgets
    temperature: float = 1.0
    """The temperature that tokens were sampled at."""

    @torch.no_grad()
    def log_probs(self, batch: TokenBatch) -> Tensor:
        """Log-prob of each token in the loss given its prefix, (num_tokens,) float32; else 0."""
        return at_targets(
            self.engine, batch, self.budgets.inference,
            lambda inputs: self.engine.forward(inputs, self.temperature)[0],
        )  # fmt: skip

    def update(self, mini_batch: TokenBatch) -> Metrics:
        """One optimizer step on this rank's share of a mini-batch; metrics are over all ranks.

        Needs the token columns `advantages`, `loss_weights` (made for all ranks), `ref_log_probs`
        if KL is in the loss; without `old_log_probs` the present policy is the old one.
        """
        micros = self.engine.micro_batches(mini_batch, self.budgets.update)
        rows, peaks = [], []
        for number, (_, micro) in enumerate(micros, 1):
            inputs = inputs_of(self.engine, micro)
            loss, observed, mismatch = self._loss(micro, inputs)
            self.engine.backward(loss, is_last=number == len(micros))
            rows.append(observed)
            peaks.append(mismatch)
        metrics = apply_update(self.engine, "actor", mini_batch, micros, _SUMS, rows)
        if "rollout_log_probs" in mini_batch.tokens:
            peak = reduced(torch.stack(peaks).amax(0, keepdim=True), self.engine.device, MAX)
            metrics["actor/rollout_mismatch_max"] = float(peak)
        square = metrics.pop(f"actor/{_SQUARE}")
        mean = metrics["actor/rollout_weight"]
        metrics["actor/rollout_ess"] = mean**2 / square if square else 0.0
        return metrics

    def _loss(self, micro: TokenBatch, inputs: PackedInputs) -> tuple[Tensor, Tensor, Tensor]:
        """This micro-batch's share of the loss, of the metrics `_SUMS`, and the peak mismatch."""
        config = self.config
        with_entropy = config.entropy_coeff != 0.0
        log_probs, entropy = self.engine.forward(inputs, self.temperature, with_entropy)
        columns = Columns(micro, inputs)
        weights, old = columns["loss_weights"], log_probs.detach()
        if "old_log_probs" in micro.tokens:
            old = columns["old_log_probs"]
        rollout = columns.rollout_log_probs(old)
        losses, seen, corrections = self._policy_losses(log_probs, old, rollout, columns)
        pg_loss, zero = weighted_sum(losses, weights), weights.new_zeros(())
        entropy, kl_loss, llds_loss = weighted_sum(entropy, weights), zero, zero
        if config.use_kl_loss and config.kl_loss_coef > 0:
            kl = kl_penalty(log_probs, columns["ref_log_probs"], config.kl_loss_type)
            kl_loss = weighted_sum(kl, weights)
        if config.llds_coef > 0:
            gates = columns.turns if config.llds_gate == "turn" else columns.sequence_ids
            kept = columns["advantages"] >= 0
            llds_loss = weighted_sum(likelihood_loss(log_probs, old, kept, gates), weights)
        loss = pg_loss + config.kl_loss_coef * kl_loss - config.entropy_coeff * entropy
        loss = loss + config.llds_coef * llds_loss
        mismatch = (old - rollout).abs()
        by_token = (seen.approx_kl, seen.clipped, seen.dual_clipped, mismatch,
                    kl_penalty(rollout, old, "k3"), corrections, corrections**2,
                    (corrections == 0).to(losses.dtype))  # fmt: skip
        observed = torch.stack([
            loss, pg_loss, kl_loss, llds_loss, entropy,
            *(weighted_sum(x, weights) for x in by_token), weights.sum(),
        ]).detach()  # fmt: skip
        return loss, observed, mismatch.max() if len(mismatch) else zero

    def _policy_losses(
        self, log_probs: Tensor, old: Tensor, rollout: Tensor, columns: Columns
    ) -> tuple[Tensor, PolicyDiagnostics, Tensor]:
        """The chosen policy loss by token, weighed for the engine's mismatch if asked; and the
        weights."""
        config = self.config
        high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
        ids = columns.sequence_ids
        inputs = PolicyLossInputs(
            log_probs, old, columns["advantages"], ids, config.clip_ratio, high, config.clip_ratio_c
        )
        losses, seen = POLICY_LOSSES[config.policy_loss](inputs)
        weights = correction(config, old, rollout, ids)
        return losses * weights, seen, weights


_SQUARE = "rollout_weight_squared"
_SUMS = (
    "loss", "pg_loss", "kl_loss", "llds_loss", "entropy",
    "ppo_kl", "clip_fraction", "dual_clip_fraction", "rollout_mismatch", "rollout_kl",
    "rollout_weight", _SQUARE, "rollout_masked", "weight",
)  # fmt: skip
"""Sums over tokens, weighted as the loss is."""


@dataclass(frozen=True)
class Columns:
    """Token columns of a micro-batch at the tokens of a forward, (num_targets,) on its device."""

    micro: TokenBatch
    inputs: PackedInputs

    def __getitem__(self, name: str) -> Tensor:
        return self._at_targets(self.micro.tokens[name])

    def _at_targets(self, column: Tensor) -> Tensor:
        """The values of a column (num_tokens,) of the host at the targets."""
        return sent(column[self.inputs.target_positions], self.inputs.targets.device)

    @property
    def sequence_ids(self) -> Tensor:
        """Which sequence of the micro-batch each token belongs to."""
        return self._at_targets(sequence_ids(self.micro.offsets))

    @property
    def turns(self) -> Tensor:
        """Which run of neighbouring tokens each belongs to: an observation parts two turns."""
        breaks = self.inputs.target_positions.diff(prepend=self.inputs.target_positions[:1]) > 1
        return sent(breaks.long().cumsum(0), self.inputs.targets.device)

    def rollout_log_probs(self, old_log_probs: Tensor) -> Tensor:
        """The engine's log-probs; where it sampled nothing, or did not say, the trainer's own. Both
        are those of the weights that sampled, however many updates the step has made since."""
        if not {"rollout_log_probs", "policy_mask"} <= self.micro.tokens.keys():
            return old_log_probs
        return torch.where(self["policy_mask"].bool(), self["rollout_log_probs"], old_log_probs)
