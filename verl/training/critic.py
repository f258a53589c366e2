"""The value function on a training rank: values of a batch, and one optimizer step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl.batch import TokenBatch
from verl.config import CriticConfig
from verl.core_algos.losses import value_loss, weighted_sum
from verl.training.actor import TargetColumns, apply_update, compute_at_targets, pack_inputs
from verl.training.budgets import TokenBudgets
from verl.training.fsdp import FsdpModel
from verl.training.models import PackedInputs
from verl.types import Metrics

_SUMS = ("vf_loss", "value_mean", "return_mean", "value_clip_fraction", "weight")
"""Names of the sums over tokens that `Critic._loss` returns, weighted by the loss weights."""


def with_critic_columns(batch: TokenBatch) -> TokenBatch:
    """Return the batch with the critic's loss mask and weights, where it has columns for them."""
    sources = {"loss_mask": "value_mask", "loss_weights": "value_weights"}
    own = {name: batch.tokens[x] for name, x in sources.items() if x in batch.tokens}
    return replace(batch, tokens=batch.tokens | own)


@dataclass
class Critic:
    """A value function."""

    model: FsdpModel
    config: CriticConfig
    budgets: TokenBudgets

    @torch.no_grad()
    def values(self, batch: TokenBatch) -> Tensor:
        """Compute the value before each token in its loss, 0 elsewhere: (num_tokens,) float32."""
        batch = with_critic_columns(batch)
        return compute_at_targets(self.model, batch, self.budgets.inference, self.model.forward)

    def update(self, mini_batch: TokenBatch) -> Metrics:
        """Take an optimizer step on this rank's share of a mini-batch; return global metrics.

        Needs the token columns `values` (the old ones), `returns` and `loss_weights`.
        """
        mini_batch = with_critic_columns(mini_batch)
        micro_batches = self.model.micro_batches(mini_batch, self.budgets.update)
        sums = []
        for number, (_, micro_batch) in enumerate(micro_batches, 1):
            loss, micro_sums = self._loss(micro_batch, pack_inputs(self.model, micro_batch))
            self.model.backward(loss, is_last=number == len(micro_batches))
            sums.append(micro_sums)
        return apply_update(self.model, "critic", mini_batch, micro_batches, _SUMS, sums)

    def updates(self, mini_batches: Sequence[TokenBatch]) -> list[Metrics]:
        """Call `update` for each mini-batch, in order."""
        return [self.update(mini_batch) for mini_batch in mini_batches]

    def _loss(self, micro_batch: TokenBatch, inputs: PackedInputs) -> tuple[Tensor, Tensor]:
        """Compute a micro-batch's share of the loss and its sums `_SUMS`."""
        bound = self.config.cliprange_value
        columns = TargetColumns(micro_batch, inputs)
        values = self.model.forward(inputs)
        weights = columns["loss_weights"]
        old, returns = columns["values"], columns["returns"]
        loss = weighted_sum(value_loss(values, old, returns, bound), weights)
        is_clipped = ((values.detach() - old).abs() > bound).float()
        sums = [weighted_sum(x, weights) for x in (values, returns, is_clipped)]
        return loss, torch.stack([loss, *sums, weights.sum()]).detach()
