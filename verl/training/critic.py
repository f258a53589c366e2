"""The value function on training ranks: values of a batch, and one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl.config import CriticConfig
from verl.core_algos.losses import value_loss, weighted_sum
from verl.training.actor import Columns, apply_update, at_targets, inputs_of
from verl.training.budgets import TokenBudgets
from verl.training.fsdp import FsdpModel
from verl.training.models import PackedInputs
from verl.types import Metrics, TokenBatch

_SUMS = ("vf_loss", "value_mean", "return_mean", "value_clip_fraction", "weight")
"""Sums over tokens, weighted as the loss is."""


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
        batch = as_critic_sees(batch)
        return at_targets(self.engine, batch, self.budgets.inference, self.engine.forward)

    def update(self, mini_batch: TokenBatch) -> Metrics:
        """One optimizer step on this rank's share of a mini-batch; metrics are over all ranks.
        Needs the token columns `values` (the old ones), `returns` and `loss_weights`."""
        micros = self.engine.micro_batches(as_critic_sees(mini_batch), self.budgets.update)
        rows = []
        for number, (_, micro) in enumerate(micros, 1):
            inputs = inputs_of(self.engine, micro)
            loss, observed = self._loss(micro, inputs)
            self.engine.backward(loss, is_last=number == len(micros))
            rows.append(observed)
        return apply_update(self.engine, "critic", mini_batch, micros, _SUMS, rows)

    def updates(self, minis: Sequence[TokenBatch]) -> list[Metrics]:
        """`update` for each of these, in their order."""
        return [self.update(mini) for mini in minis]

    def _loss(self, micro: TokenBatch, inputs: PackedInputs) -> tuple[Tensor, Tensor]:
        """This micro-batch's share of the loss and of the metrics `_SUMS`."""
        bound = self.config.cliprange_value
        columns = Columns(micro, inputs)
        values, weights = self.engine.forward(inputs), columns["loss_weights"]
        old, returns = columns["values"], columns["returns"]
        loss = weighted_sum(value_loss(values, old, returns, bound), weights)
        is_clipped = ((values.detach() - old).abs() > bound).float()
        observed = [weighted_sum(x, weights) for x in (values, returns, is_clipped)]
        return loss, torch.stack([loss, *observed, weights.sum()]).detach()
