"""Floating-point operations (FLOPs) of a model over packed sequences, and the most a card can do.

A multiplication with its addition is two. Matrix products are counted, attention's among them, as
by Kaplan et al. 2020 (section 2.1) and in appendix B of PaLM (Chowdhery et al. 2022); norms,
rotations, activations and softmax are not, and an embedding is a look-up. Causal attention is half
of the square that PaLM counts, since a causal kernel leaves the other half out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from verl.model_shape import ModelShape


@dataclass(frozen=True)
class ModelFlops:
    """What one model needs for sequences of `lengths` tokens, and a head for `num_targets` of them.

    A sliding window is not known here: sequences are taken to be no longer than it.
    """

    shape: ModelShape
    is_critic: bool = False
    """The head gives one value instead of a logit for each entry of the vocabulary."""
    adapter: int = 0
    """Parameters of a LoRA adapter, below which the model is frozen; 0 where all of it learns."""
    has_checkpointing: bool = False
    """Blocks keep their input alone, and compute their products again in backward."""

    def _attention(self, lengths: Sequence[int]) -> int:
        """Scores and sums of values: 4 · heads · head_dim · n² / 2 for each layer and sequence."""
        return 2 * self.shape.layers * self.shape.query_size * sum(n * n for n in lengths)

    @property
    def pair_cost(self) -> float:
        """What attention costs for the square of a sequence, where matrices cost 1 a token."""
        return self._attention([1]) / (2 * (self.shape.linear_weights + self.adapter))

    def _head(self, num_targets: int) -> int:
        outputs = 1 if self.is_critic else self.shape.vocab
        return 2 * outputs * self.shape.hidden * num_targets

    def forward(self, lengths: Sequence[int], num_targets: int) -> int:
        """2 for each token and weight of a matrix, and attention."""
        weights = self.shape.linear_weights + self.adapter
        return 2 * weights * sum(lengths) + self._attention(lengths) + self._head(num_targets)

    def backward(self, lengths: Sequence[int], num_targets: int) -> int:
        """Twice the forward: the gradient of each product's input, and that of its weight.

        A frozen weight has no gradient of its own, so it costs 2 for each token instead of 4. Below
        an adapter the first block's inputs need none either; that is counted all the same.
        """
        both = 2 * self.forward(lengths, num_targets)
        if not self.adapter:
            return both
        head = 0 if self.is_critic else self._head(num_targets)
        return both - 2 * self.shape.linear_weights * sum(lengths) - head

    def update(self, lengths: Sequence[int], num_targets: int) -> int:
        """Forward and backward: the model FLOPs of PaLM, in which nothing is computed again."""
        return self.forward(lengths, num_targets) + self.backward(lengths, num_targets)

    def recomputed(self, lengths: Sequence[int], num_targets: int = 0) -> int:
        """What an update does a second time: blocks with checkpointing, and `num_targets` logits.

        torch stops before a block's last product, whose result backward does not need (but where
        an adapter follows it).
        """
        if not self.has_checkpointing:
            return self._head(num_targets)
        again = self.forward(lengths, num_targets)
        last = 0 if self.adapter else self.shape.last_products
        return again - 2 * last * sum(lengths)


PEAK_TFLOPS = {
    "B200": 2250, "H200": 989, "H200 NVL": 835, "H100": 989, "H100 PCIe": 756, "H100 NVL": 835,
    "H800": 989, "H20": 148, "A100": 312, "A800": 312, "A40": 150, "A30": 165, "A10": 125,
    "L40S": 362, "L40": 181, "L4": 121, "RTX A6000": 155, "RTX 6000 Ada": 364,
    "RTX 4090": 165, "RTX 3090": 71, "V100": 125, "T4": 65, "RTX 2080 Ti": 54,
}  # fmt: skip
"""TFLOP/s of dense 16-bit matrix products that are summed in float32, by a part of the card's name;
from NVIDIA's data sheets (half of what they give with sparsity), for GeForce and RTX cards from its
white papers on the architectures."""
FLOAT16_ONLY = ("V100", "T4", "RTX 2080 Ti")
"""Cards without units for bfloat16."""
PART_OF_A_CARD = re.compile(r"\b(MIG|Laptop|Max-Q|D)\b")
"""In the name of a slice of a card, or of a slower one that has another's name."""


def peak_flops(card: str, dtype: str) -> float | None:
    """The most FLOP/s of a card by torch's name for it, in dtype `bfloat16` or `float16`.

    None for another dtype or an unknown card. Example: `NVIDIA A100-SXM4-80GB` is an A100.
    """
    words = [word for word in PEAK_TFLOPS if re.search(rf"\b{word}\b", card)]
    if not words or PART_OF_A_CARD.search(card):
        return None
    name = max(words, key=len)
    dtypes = ("float16",) if name in FLOAT16_ONLY else ("float16", "bfloat16")
    return 1e12 * PEAK_TFLOPS[name] if dtype in dtypes else None
