"""Attention to few 16-bit keys on the CPU: torch's own kernel takes up to three times as long."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from verl.training import attention
from verl.training.attention import SequenceBounds, attend_per_run, attend_run, causal_mask

_masks = WeakTensorKeyDictionary()
"""Masks of the runs of each row, which its first layer builds for all layers, by the row's offsets.

They are stacked for queries that share a key head: (repeats * length, num_keys) float32. FSDP makes
copies of a row's bounds for each block, but not of tensors.
"""


def attend_short_runs(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int
) -> Tensor:
    """Compute `attend_per_run`, short runs by plain matrix products."""
    masks = _masks.setdefault(bounds.cu_seqlens, {})

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
        length, num_keys, repeats = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
        if num_keys > attention.SHORT:
            return attend_run(query, key, value, scale, window)
        size = length, num_keys, window, repeats
        if size not in masks:
            masks[size] = causal_mask(*size[:3], torch.empty(0)).repeat(repeats, 1)
        attended: Tensor = ShortAttention.apply(query, key, value, scale, masks[size])  # type: ignore[no-untyped-call]
        return attended

    return attend_per_run(query, key, value, bounds, scale, window, attend)


class ShortAttention(torch.autograd.Function):
    """Attention by plain matrix products.

    Queries that share a key head are multiplied with it at once. Scores are float32, where rounding
    would matter; weights and gradients have 16 bits, as in torch's kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor
    ) -> Tensor:
        """Add `mask` (queries that share a key head, num_keys) to the scores; return the values."""
        factors = by_key_head(query, key).float(), key[0].float().transpose(1, 2)
        with exact_products(query.dtype):
            scores = torch.baddbmm(mask, *factors, alpha=scale)
        weights = scores.softmax(-1).to(query.dtype)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, weights)
        return torch.bmm(weights, value[0]).view(query.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, weights = ctx.saved_tensors
        gradient = by_key_head(gradient, key)
        d_value = torch.bmm(weights.transpose(1, 2), gradient)
        d_weights = torch.bmm(gradient, value[0].transpose(1, 2))
        d_scores = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        d_scores = d_scores.mul_(ctx.scale)
        d_query = torch.bmm(d_scores, key[0]).view(query.shape)
        d_key = torch.bmm(d_scores.transpose(1, 2), by_key_head(query, key))
        return d_query, d_key[None], d_value[None], None, None


@contextlib.contextmanager
def exact_products(dtype: torch.dtype) -> Iterator[None]:
    """Multiply float32 matrices as bfloat16, with float32 sums, if `dtype` is bfloat16.

    For matrices converted from bfloat16 this is just as exact, in a third of the time.
    """
    options = torch.backends.mkldnn.matmul  # type: ignore[attr-defined] # made at run time
    previous = options.fp32_precision
    options.fp32_precision = "bf16" if dtype is torch.bfloat16 else previous
    try:
        yield
    finally:
        options.fp32_precision = previous


def by_key_head(query: Tensor, key: Tensor) -> Tensor:
    """Group `query` (1, heads, length, head_dim) by key head: (key heads, queries, head_dim)."""
    return query[0].reshape(key.shape[1], -1, query.shape[-1])
