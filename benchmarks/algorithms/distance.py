"""Computes a trained policy's exact KL from its base policy, and its entropy, at sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from verl.types import Origin, Trajectory

BATCH_SIZE = 32
"""Trajectories per forward pass."""


@dataclass(frozen=True)
class Distance:
    """Means over all policy tokens of some trajectories, in nats."""

    kl: float
    """KL(policy ‖ base), summed over the whole vocabulary at each token."""
    entropy: float
    """Entropy of the policy."""


def load(folder: Path) -> PreTrainedModel:
    """Load a policy in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def policy_positions(trajectory: Trajectory) -> list[int]:
    """Return the positions of the tokens that the policy sampled."""
    positions: list[int] = []
    start = 0
    for segment in trajectory.segments:
        if segment.origin is Origin.POLICY:
            positions += range(start, start + len(segment.ids))
        start += len(segment.ids)
    return positions


def log_probs(model: PreTrainedModel, trajectories: Sequence[Trajectory]) -> Tensor:
    """Compute log-probs of the vocabulary at each policy token: (num_policy_tokens, vocab).

    Sequences are padded on the right without a mask: causal attention ignores later positions.
    """
    ids = [torch.tensor(trajectory.ids) for trajectory in trajectories]
    logits = model(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)).logits
    before_policy_tokens = [
        row[torch.tensor(policy_positions(trajectory), dtype=torch.int64) - 1]
        for row, trajectory in zip(logits, trajectories, strict=True)
    ]
    return torch.log_softmax(torch.cat(before_policy_tokens).float(), dim=-1)


@torch.no_grad()
def distance(
    policy: PreTrainedModel, base: PreTrainedModel, trajectories: Sequence[Trajectory]
) -> Distance:
    """Compute the distance of `policy` from `base` at the tokens that `policy` sampled."""
    kls, entropies = [], []
    for start in range(0, len(trajectories), BATCH_SIZE):
        batch = trajectories[start : start + BATCH_SIZE]
        p, q = (log_probs(model, batch) for model in (policy, base))
        kls.append((p.exp() * (p - q)).sum(-1))
        entropies.append(-(p.exp() * p).sum(-1))
    return Distance(float(torch.cat(kls).mean()), float(torch.cat(entropies).mean()))
