"""Attention over packed sequences: one row of tokens holds many sequences, none of them padded.

Importing this module registers `PACKED` with transformers. A model whose attention
implementation is `PACKED` takes batch size 1, `position_ids` that restart at each sequence, and
the `SequenceBounds` of the row as the keyword `bounds`, which transformers hands through to every
layer. No mask is built: transformers has none for a name it does not know.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED = "verl_packed"


@dataclass(frozen=True)
class SequenceBounds:
    """Where the sequences of a packed row begin and end."""

    lengths: tuple[int, ...]
    """Tokens of each sequence, all positive."""
    cu_seqlens: Tensor
    """(num_seqs + 1,) int32 on the model's device."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> SequenceBounds:
        """Bounds of sequences with these lengths."""
        total = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(tuple(lengths), total.to(device))

    @property
    def position_ids(self) -> Tensor:
        """(1, num_tokens) positions, restarting at 0 for each sequence."""
        device = self.cu_seqlens.device
        return torch.cat([torch.arange(n, device=device) for n in self.lengths])[None]


VarlenKernel = Callable[[Tensor, Tensor, Tensor, SequenceBounds, float, int], Tensor]


def attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int
) -> Tensor:
    """Causal attention of each sequence by itself: no padding and no mask over the whole row.

    `query` is (num_tokens, heads, head_dim), `key` and `value` have the key-value heads;
    `window` 0 means unlimited. Returns the shape of `query`.
    """
    if query.is_cuda:  # the kernel there that needs no length x length matrix shares no heads
        key, value = with_heads_of(query, key), with_heads_of(query, value)
    parts = [
        torch.split(x.transpose(0, 1)[None], list(bounds.lengths), dim=2)
        for x in (query, key, value)
    ]
    outputs = [
        scaled_dot_product_attention(
            q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
            **_mask(q.shape[2], window, q.device),
        )
        for q, k, v in zip(*parts, strict=True)
    ]  # fmt: skip
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def _mask(length: int, window: int, device: torch.device) -> dict[str, Any]:
    if not 0 < window < length:
        return {"is_causal": True}
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return {"attn_mask": ones.tril() & ones.triu(1 - window)}


def with_heads_of(query: Tensor, x: Tensor) -> Tensor:
    """`x` (num_tokens, key-value heads, head_dim) with each head as often as queries share it."""
    num_queries = query.shape[1] // x.shape[1]
    return x.repeat_interleave(num_queries, dim=1) if num_queries > 1 else x


def attend_with_flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:  # fmt: skip
    """The same by the flash-attn package (2.4.1 or newer, or what `kernel` is); 16-bit only."""
    if kernel is None:
        from flash_attn import flash_attn_varlen_func  # noqa: PLC0415 - optional, CUDA only

        kernel = flash_attn_varlen_func
    cu, longest = bounds.cu_seqlens, max(bounds.lengths)
    found: Tensor = kernel(
        query, key, value, cu, cu, longest, longest, softmax_scale=scale, causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return found


def attend_with_torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:  # fmt: skip
    """The same by torch's own variable-length flash attention (or `kernel`); 16-bit, CUDA only."""
    if kernel is None:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - newer torch only

        kernel = cast("Callable[..., Tensor]", varlen_attn)  # it was asked for nothing more
    shares_heads = {}
    if shares_key_heads(kernel):
        shares_heads = {"enable_gqa": query.shape[1] != key.shape[1]}
    else:
        key, value = with_heads_of(query, key), with_heads_of(query, value)
    cu, longest = bounds.cu_seqlens, max(bounds.lengths)
    found: Tensor = kernel(
        query, key, value, cu, cu, longest, longest, scale=scale,
        window_size=(window - 1 if window else -1, 0), **shares_heads,
    )  # fmt: skip
    return found


@functools.cache
def shares_key_heads(kernel: Callable[..., Any]) -> bool:
    """Whether several queries may share a key-value head in this torch's kernel: 2.12 and newer."""
    return "enable_gqa" in inspect.signature(kernel).parameters


@functools.cache
def cuda_kernel() -> VarlenKernel:
    """The fastest kernel for 16-bit tensors of this installation on this process's device.

    Flash attention needs capability 8.0 (Ampere) or higher.
    """
    if torch.cuda.get_device_capability() < (8, 0):
        return attend_one_by_one
    try:  # the function itself: any folder of that name on the path would import as the package
        from flash_attn import flash_attn_varlen_func  # noqa: F401, PLC0415 - optional
    except ImportError:
        pass
    else:
        return attend_with_flash
    try:
        from torch.nn.attention import varlen  # noqa: F401, PLC0415 - newer torch only
    except ImportError:
        return attend_one_by_one
    return attend_with_torch_varlen


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    bounds: SequenceBounds | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; tensors are (1, heads, num_tokens, head_dim).

    Returns (1, num_tokens, heads, head_dim). Dropout is not applied: sampling had none.
    """
    assert bounds is not None, f"{PACKED} needs `bounds`: call the model with a SequenceBounds"
    assert attention_mask is None, f"{PACKED} takes no mask, got {attention_mask.shape}"
    half = query.dtype in (torch.bfloat16, torch.float16)
    kernel = cuda_kernel() if query.is_cuda and half else attend_one_by_one
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return kernel(query, key, value, bounds, scale, sliding_window or 0)[None], None


AttentionInterface.register(PACKED, packed_attention)
