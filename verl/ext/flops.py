"""Floating-point operations (FLOPs) of a model over packed sequences, and peak FLOP/s of GPUs.

A multiplication with its addition counts as two. Matrix products are counted, including those of
attention, as by Kaplan et al. 2020 (section 2.1) and in appendix B of PaLM (Chowdhery et al. 2022);
norms, rotary embeddings, activations and softmax are not, and an embedding is a look-up. Causal
attention counts half of the square that PaLM counts, since a causal kernel skips the other half.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from verl.config.policy import BlocksConfig
from verl.ext.model_shape import ModelShape, read_shape


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one model for sequences of `lengths` tokens, with its head on `num_targets` of them.

    Sliding windows are ignored: sequences are assumed to be no longer than the window.
    """

    shape: ModelShape
    is_critic: bool = False
    """Whether the head returns one value instead of a logit for each entry of the vocabulary."""
    adapter: int = 0
    """Parameters of a LoRA adapter on a frozen model; 0 if all parameters are trained."""
    has_checkpointing: bool = False
    """Whether blocks store only their input and recompute their products in backward."""

    def _attention(self, lengths: Sequence[int]) -> int:
        """Return 4 · heads · head_dim · n² / 2 (scores and sums of values) per layer, sequence."""
        return 2 * self.shape.layers * self.shape.query_size * sum(n * n for n in lengths)

    def _head(self, num_targets: int) -> int:
        return 2 * (1 if self.is_critic else self.shape.vocab) * self.shape.hidden * num_targets

    def forward(self, lengths: Sequence[int], num_targets: int) -> int:
        """Return 2 FLOPs per token and matrix weight, plus attention and head."""
        weights = self.shape.linear_weights + self.adapter
        return 2 * weights * sum(lengths) + self._attention(lengths) + self._head(num_targets)

    def backward(self, lengths: Sequence[int], num_targets: int) -> int:
        """Return twice the forward FLOPs: gradients of each product's input and of its weight.

        Frozen weights have no gradient and cost 2 per token instead of 4. The gradient of the first
        block's inputs, which a frozen model does not need, is counted anyway.
        """
        full = 2 * self.forward(lengths, num_targets)
        if not self.adapter:
            return full
        head = 0 if self.is_critic else self._head(num_targets)
        return full - 2 * self.shape.linear_weights * sum(lengths) - head

    def update(self, lengths: Sequence[int], num_targets: int) -> int:
        """Return the FLOPs of forward and backward: PaLM's model FLOPs, without recomputation."""
        return self.forward(lengths, num_targets) + self.backward(lengths, num_targets)

    def recomputed(self, lengths: Sequence[int], num_targets: int = 0) -> int:
        """Return the FLOPs an update recomputes: checkpointed blocks, and `num_targets` logits.

        torch stops before a block's last product, whose result the backward pass does not need,
        except where an adapter follows it.
        """
        if not self.has_checkpointing:
            return self._head(num_targets)
        forward = self.forward(lengths, num_targets)
        last = 0 if self.adapter else self.shape.last_linear_weights
        return forward - 2 * last * sum(lengths)


def model_flops(options: BlocksConfig, path: str, is_critic: bool) -> ModelFlops | None:
    """Return the FLOPs of the model at `path` with its adapter, if any; None: unknown shape."""
    shape = read_shape(path)
    if shape is None:
        return None
    adapter = shape.adapter(options.lora_rank, options.target_modules)
    return ModelFlops(shape, is_critic, adapter, options.enable_gradient_checkpointing is True)


PEAK_TFLOPS = {
    "B200": 2250, "H200": 989, "H200 NVL": 835, "H100": 989, "H100 PCIe": 756, "H100 NVL": 835,
    "H800": 989, "H20": 148, "A100": 312, "A800": 312, "A40": 150, "A30": 165, "A10": 125,
    "L40S": 362, "L40": 181, "L4": 121, "RTX A6000": 155, "RTX 6000 Ada": 364,
    "RTX 4090": 165, "RTX 3090": 71, "V100": 125, "T4": 65, "RTX 2080 Ti": 54,
}  # fmt: skip
"""TFLOP/s of dense 16-bit matrix products with float32 accumulation, by a part of the card's name.

From NVIDIA's data sheets (half of the figures with sparsity) and architecture white papers (RTX).
"""
FLOAT16_ONLY = ("V100", "T4", "RTX 2080 Ti")
"""Cards without bfloat16 support."""
OTHER_SPEED = re.compile(r"\b(MIG|Laptop|Max-Q|D)\b")
"""Words in the name of a MIG slice, or of a slower variant of a listed card."""


def peak_flops(card: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a card, by torch's name for it, in dtype `bfloat16` or `float16`.

    None for another dtype or an unknown card. Example: `NVIDIA A100-SXM4-80GB` is an A100.
    """
    matches = [name for name in PEAK_TFLOPS if re.search(rf"\b{name}\b", card)]
    if not matches or OTHER_SPEED.search(card):
        return None
    name = max(matches, key=len)
    dtypes = ("float16",) if name in FLOAT16_ONLY else ("float16", "bfloat16")
    return 1e12 * PEAK_TFLOPS[name] if dtype in dtypes else None
