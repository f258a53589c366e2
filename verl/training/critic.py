"""The value function on training ranks: values of a batch, and one optimizer step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl.config import CriticConfig
from verl.core_algos.losses import value_loss, weighted_sum
from verl.training.actor import Columns, TokenBudgets, loss_mask
from verl.training.fsdp import FsdpModel, reduce_sum
from verl.training.models import PackedInputs
from verl.types import Metrics, TokenBatch

logger = logging.getLogger(__name__)

_SUMS = ("vf_loss", "value_mean", "return_mean", "value_clip_fraction", "weight")
"""Sums over tokens, weighted as the loss is; all but the loss are reported as means."""


def as_critic_sees(batch: TokenBatch) -> TokenBatch:
    """The batch with the critic's own mask and weights, where they are not the policy's."""
    own = {"loss_mask": "value_mask", "loss_weights": "value_weights"}
    found = {name: batch.tokens[mine] for name, mine in own.items() if mine in batch.tokens}
    return replace(batch, tokens=batch.tokens | found)


@dataclass
class Critic:
    """A value model in an engine."""

    engine: FsdpModel
    config: CriticConfig
    budgets: TokenBudgets

    @torch.no_grad()
    def values(self, batch: TokenBatch) -> Tensor:
        """Value of the state before each token in its loss, (num_tokens,) float32; else 0."""
        batch, result = as_critic_sees(batch), torch.zeros(batch.num_tokens)
        for indices, micro in self.engine.micro_batches(batch, self.budgets.inference):
            inputs = PackedInputs.of(micro, loss_mask(micro), self.engine.device)
            found = self.engine.forward(inputs)
            if indices:
                result[batch.positions(indices)[inputs.target_positions.cpu()]] = found.cpu()
        self.engine.reshard()
        return result

    def update(self, mini_batch: TokenBatch) -> Metrics:
        """One optimizer step on this rank's share of a mini-batch; metrics are over all ranks.

        Needs the token columns `values` (the old ones), `returns` and `loss_weights`.
        """
        micros = self.engine.micro_batches(as_critic_sees(mini_batch), self.budgets.update)
        sums = torch.zeros(len(_SUMS))
        for _, micro in micros:
            inputs = PackedInputs.of(micro, loss_mask(micro), self.engine.device)
            loss, observed = self._loss(micro, inputs)
            self.engine.backward(loss)
            sums += observed
        total = reduce_sum(sums, self.engine.device)
        step = self.engine.step(is_finite=bool(total.isfinite().all()))
        if step.is_faulty:
            logger.warning("critic update skipped: gradient norm %s on groups %s", step.grad_norm,
                           mini_batch.columns.get("group"))  # fmt: skip
        seen = dict(zip(_SUMS, total.tolist(), strict=True))
        weight = max(seen.pop("weight"), 1e-12)
        return {
            "critic/vf_loss": seen.pop("vf_loss"),
            **{f"critic/{name}": x / weight for name, x in seen.items()},
            **step.metrics("critic"),
            "critic/num_micro_batches": float(len(micros)),
        }

    def _loss(self, micro: TokenBatch, inputs: PackedInputs) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the loss and of the metrics `_SUMS`."""
        bound = self.config.cliprange_value
        columns = Columns(micro, inputs)
        values, weights = self.engine.forward(inputs), columns["loss_weights"]
        old, returns = columns["values"], columns["returns"]
        loss = weighted_sum(value_loss(values, old, returns, bound), weights)
        is_clipped = ((values.detach() - old).abs() > bound).float()
        observed = [weighted_sum(x, weights) for x in (values, returns, is_clipped)]
        return loss, torch.stack([loss, *observed, weights.sum()]).detach().cpu()
