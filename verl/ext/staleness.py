"""How old the weights are that sampled the tokens of a step, in versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from verl.batch import TokenBatch
from verl.trainer.hooks import Hook
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


class Staleness(Hook):
    """Adds the ages of a step's tokens to its metrics."""

    def on_trained(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Compare with the version before the one that the engines have now."""
        assert trainer.current.batch is not None, "a step that is trained has a batch"
        metrics |= staleness_metrics(trainer.current.batch, trainer.version - 1)


def hook(parts: Parts) -> Staleness:
    """Return the hook of a run."""
    return Staleness()


def staleness_metrics(batch: TokenBatch, version: int) -> Metrics:
    """Return how many weight versions policy tokens are older than the trainer's `version`.

    The metrics are the mean, and the share of tokens for each age.
    """
    versions = batch.tokens["weight_versions"][batch.tokens["policy_mask"]]
    ages, counts = np.unique(version - versions.numpy(), return_counts=True)
    shares = counts / max(1, counts.sum())
    metrics = {"rollout/staleness/mean": float((ages * shares).sum())}
    for age, share in zip(ages.tolist(), shares.tolist(), strict=True):
        metrics[f"rollout/staleness/share_{age}"] = float(share)
    return metrics
