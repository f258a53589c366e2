"""Attention over packed sequences: one row of tokens holds many sequences, none of them padded.

Importing this module registers `PACKED` with transformers. A model whose attention
implementation is `PACKED` takes batch size 1, `position_ids` that restart at each sequence, and
the `SequenceBounds` of the row as the keyword `bounds`, which transformers hands through to every
layer. No mask is built: transformers has none for a name it does not know.

Responses to one prompt may follow one copy of it. All else of a layer is by token; only here a
response looks at the prompt, whose keys and values are copied in front of its own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from verl.training.devices import to_device
from verl.training.sequence_parallel import SequenceParallelGroup

PACKED = "verl_packed"
HALF = (torch.bfloat16, torch.float16)


Span = tuple[int, int]
"""First and end position of a run of tokens. Where the first is not 0, the tokens before it are
those of the last run that began at 0, which has just so many."""


class ShortMasks:
    """Masks of short runs on the CPU, of which all layers use those of the first. No dict and no
    dataclass: FSDP copies those for each block that is called with them."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Tensor] = {}

    def of(self, length: int, num_keys: int, window: int, repeats: int) -> Tensor:
        """That of each run, `repeats` times below each other, float32."""
        key = length, num_keys, window, repeats
        if key not in self._known:
            mask = _mask(length, num_keys, window, torch.empty(0))
            self._known[key] = mask.repeat(repeats, 1)
        return self._known[key]


@dataclass(frozen=True)
class SequenceBounds:
    """Where the runs of tokens of a packed row begin and end, and what each of them sees."""

    spans: tuple[Span, ...]
    """Positions of each run's tokens; a run sees itself and what is before it."""
    cu_seqlens: Tensor
    """(num_spans + 1,) int32 on the model's device: where the runs are in the row."""
    cu_keys: Tensor
    """The same of what each run sees, in what `keys_of` gives."""
    sp_group: SequenceParallelGroup | None = None
    """Ranks that compute the row together; None where this rank computes all of it."""
    masks: ShortMasks = field(default_factory=ShortMasks, compare=False)
    """Of short runs."""

    @classmethod
    def of(
        cls,
        spans: Sequence[Span],
        device: torch.device,
        sp_group: SequenceParallelGroup | None = None,
    ) -> SequenceBounds:
        """Bounds of runs with these positions."""
        queries, keys = (
            to_device(torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32), device)
            for sizes in ([end - start for start, end in spans], [end for _, end in spans])
        )
        return cls(tuple(spans), queries, keys, sp_group)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each run, all positive."""
        return [end - start for start, end in self.spans]

    @property
    def num_keys(self) -> list[int]:
        """Tokens that each run sees the last of."""
        return [end for _, end in self.spans]

    @property
    def position_ids(self) -> Tensor:
        """(1, num_tokens) positions in the sequences; with a group, of its slice only."""
        positions = torch.cat([torch.arange(*span) for span in self.spans])[None]
        own = positions if self.sp_group is None else self.sp_group.local_slice(positions)
        return to_device(own, self.cu_seqlens.device)

    def keys_of(self, x: Tensor) -> Tensor:
        """Keys or values `x` (num_tokens, ...) with those of the prompt before each response."""
        if all(start == 0 for start, _ in self.spans):
            return x
        parts: list[Tensor] = []
        for (start, _), part in zip(self.spans, x.split(self.lengths), strict=True):
            if start == 0:
                prompt = part
            else:
                parts.append(prompt)
            parts.append(part)
        return torch.cat(parts)


VarlenKernel = Callable[[Tensor, Tensor, Tensor, SequenceBounds, float, int], Tensor]


def attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int
) -> Tensor:
    """Causal attention of each run by itself: `query` and the answer are (num_tokens, heads,
    head_dim), `key` and `value` what `keys_of` gives of the key-value heads; `window` 0 means
    unlimited."""
    if query.is_cuda:  # the kernel there that needs no length x length matrix shares no heads
        key, value = with_heads_of(query, key), with_heads_of(query, value)
    sizes = (bounds.lengths, bounds.num_keys, bounds.num_keys)
    parts = [
        torch.split(x.transpose(0, 1)[None], size, dim=2)
        for x, size in zip((query, key, value), sizes, strict=True)
    ]
    outputs = [_attend(q, k, v, bounds, scale, window) for q, k, v in zip(*parts, strict=True)]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


SHORT = 256
"""Keys up to which kernels read them in one piece, whatever a mask hides."""


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int
) -> Tensor:
    """Attention of one run, whose last token sees the last key; (1, heads, length, head_dim)."""
    length, num_keys = query.shape[2], key.shape[2]
    before = num_keys - length
    is_limited = 0 < window < num_keys
    if 0 < before < length and num_keys > SHORT and not is_limited:
        # Kernels leave out what a causal square hides, and compute all that a mask does.
        query = pad(query, (0, 0, before, 0))
        return _attend(query, key, value, bounds, scale, window)[:, :, before:]
    if not query.is_cuda and num_keys <= SHORT and query.dtype in HALF:
        repeats = query.shape[1] // key.shape[1]
        hidden = bounds.masks.of(length, num_keys, window, repeats)
        attended: Tensor = ShortAttention.apply(query, key, value, scale, hidden)  # type: ignore[no-untyped-call]
        return attended
    mask = _mask(length, num_keys, window, query) if before or is_limited else None
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def _mask(length: int, num_keys: int, window: int, like: Tensor) -> Tensor:
    """0 where the last `length` of `num_keys` tokens see those before them, `window` at most; else
    minus infinity."""
    before = num_keys - length
    seen = torch.ones(length, num_keys, dtype=torch.bool, device=like.device).tril(before)
    seen = seen.triu(before + 1 - window) if window else seen
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill(~seen, -torch.inf)


class ShortAttention(torch.autograd.Function):
    """Attention of few 16-bit keys on the CPU by plain products: torch's kernel for them takes up
    to three times as long. Queries that share a key head are multiplied with it together. Scores
    are float32, where rounding would hurt; weights and gradients are 16 bits, as with that kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor
    ) -> Tensor:
        """`mask` (queries that share a key head, num_keys) is added to the scores."""
        factors = by_key_head(query, key).float(), key[0].float().transpose(1, 2)
        with exact_products(query.dtype):
            scores = torch.baddbmm(mask, *factors, alpha=scale)
        weights = scores.softmax(-1).to(query.dtype)
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, weights)
        return torch.bmm(weights, value[0]).view(query.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Of query, key and value."""
        query, key, value, weights = ctx.saved_tensors
        gradient = by_key_head(gradient, key)
        of_value = torch.bmm(weights.transpose(1, 2), gradient)
        of_weights = torch.bmm(gradient, value[0].transpose(1, 2))
        of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_scores = of_scores.mul_(ctx.scale)
        of_query = torch.bmm(of_scores, key[0]).view(query.shape)
        of_key = torch.bmm(of_scores.transpose(1, 2), by_key_head(query, key))
        return of_query, of_key[None], of_value[None], None, None


@contextlib.contextmanager
def exact_products(dtype: torch.dtype) -> Iterator[None]:
    """Inside of it float32 matrices whose numbers were bfloat16 (`dtype`) are multiplied as
    bfloat16 and added up as float32: as exact, in a third of the time. Other dtypes change
    nothing."""
    options = torch.backends.mkldnn.matmul  # type: ignore[attr-defined] # made at run time
    usual = options.fp32_precision
    options.fp32_precision = "bf16" if dtype is torch.bfloat16 else usual
    try:
        yield
    finally:
        options.fp32_precision = usual


def by_key_head(query: Tensor, key: Tensor) -> Tensor:
    """`query` (1, heads, length, head_dim) as (key heads, queries that share one, head_dim)."""
    return query[0].reshape(key.shape[1], -1, query.shape[-1])


def with_heads_of(query: Tensor, x: Tensor) -> Tensor:
    """`x` (num_tokens, key-value heads, head_dim) with each head as often as queries share it."""
    num_queries = query.shape[1] // x.shape[1]
    return x.repeat_interleave(num_queries, dim=1) if num_queries > 1 else x


def attend_with_flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int,
    flash_attn_varlen_func: Callable[..., Any],
) -> Tensor:  # fmt: skip
    """The same by a function of the flash-attn package (2.4.1 or newer); 16-bit, CUDA only."""
    found: Tensor = flash_attn_varlen_func(
        query, key, value, bounds.cu_seqlens, bounds.cu_keys,
        max(bounds.lengths), max(bounds.num_keys), softmax_scale=scale, causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return found


def attend_with_torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int,
    varlen_attn: Callable[..., Any],
) -> Tensor:  # fmt: skip
    """The same by torch's own variable-length flash attention; 16-bit, CUDA only."""
    shares_heads = {}
    if shares_key_heads(varlen_attn):
        shares_heads = {"enable_gqa": query.shape[1] != key.shape[1]}
    else:
        key, value = with_heads_of(query, key), with_heads_of(query, value)
    found: Tensor = varlen_attn(
        query, key, value, bounds.cu_seqlens, bounds.cu_keys,
        max(bounds.lengths), max(bounds.num_keys), scale=scale,
        window_size=(window - 1 if window else -1, 0), **shares_heads,
    )  # fmt: skip
    return found


@functools.cache
def shares_key_heads(kernel: Callable[..., Any]) -> bool:
    """Whether several queries may share a key-value head in this torch's kernel: 2.12 and newer."""
    return "enable_gqa" in inspect.signature(kernel).parameters


@functools.cache
def cuda_kernel() -> VarlenKernel:
    """The fastest kernel for 16-bit tensors of this installation on this process's device. Flash
    attention needs capability 8.0 (Ampere) or higher."""
    if torch.cuda.get_device_capability() < (8, 0):
        return attend_one_by_one
    with contextlib.suppress(ImportError):
        # The function: any folder of that name on the path would import as the package.
        from flash_attn import flash_attn_varlen_func  # noqa: PLC0415 - optional

        return functools.partial(attend_with_flash, flash_attn_varlen_func=flash_attn_varlen_func)
    with contextlib.suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - newer torch only

        return functools.partial(attend_with_torch_varlen, varlen_attn=varlen_attn)
    return attend_one_by_one


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
    """What transformers calls in each layer: from (1, heads, num_tokens, head_dim) to
    (1, num_tokens, heads, head_dim), with a sequence-parallel group those of this rank's slice.
    Dropout is not applied: sampling had none."""
    assert bounds is not None, f"{PACKED} needs `bounds`: call the model with a SequenceBounds"
    assert attention_mask is None, f"{PACKED} takes no mask, got {attention_mask.shape}"
    has_kernel = query.is_cuda and query.dtype in HALF
    kernel = cuda_kernel() if has_kernel else attend_one_by_one
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    sp_group = bounds.sp_group
    if sp_group is not None:
        query, key, value = sp_group.slice_to_heads((query, key, value), sum(bounds.lengths))
    key, value = bounds.keys_of(key), bounds.keys_of(value)
    found = kernel(query, key, value, bounds, scale, sliding_window or 0)
    return (found if sp_group is None else sp_group.heads_to_slice(found))[None], None


AttentionInterface.register(PACKED, packed_attention)
