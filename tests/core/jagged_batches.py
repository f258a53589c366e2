"""Small random jagged batches that the tests of core_algos share."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from verl.core_algos.policy_losses import PolicyDiagnostics, PolicyLossInputs, ppo

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@dataclass(frozen=True)
class Batch:
    """A jagged batch and random columns for it."""

    offsets: Tensor
    mask: Tensor
    seed: int

    @property
    def num_seqs(self) -> int:
        return self.offsets.numel() - 1

    @property
    def spans(self) -> list[tuple[int, int]]:
        bounds = self.offsets.tolist()
        return list(itertools.pairwise(bounds))

    def column(self, salt: int, scale: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 101 + salt)
        return scale * torch.randn(self.mask.numel(), generator=generator, dtype=torch.float64)

    def policy_positions(self) -> list[list[int]]:
        return [[t for t in range(a, b) if self.mask[t]] for a, b in self.spans]


def make_batch(masks: Sequence[Sequence[bool]], seed: int = 0) -> Batch:
    lengths = [len(m) for m in masks]
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    return Batch(offsets, torch.tensor([x for m in masks for x in m], dtype=torch.bool), seed)


batches = st.builds(
    make_batch,
    st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=6),
    st.integers(0, 1000),
)

# Prompt, policy, observation, policy; then a short one, one left out, and an empty one.
DIALOGUES = make_batch(
    [[False, False, True, True, False, False, False, True], [False, True], [False] * 3, []], seed=5
)


def ppo_losses(
    log_probs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, PolicyDiagnostics]:
    """Compute `ppo` with the usual dual clip, of tokens in one sequence."""
    ids = torch.zeros(len(log_probs), dtype=torch.int64)
    return ppo(PolicyLossInputs(log_probs, old, advantages, ids, low, high, 3.0))
