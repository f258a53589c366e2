"""Attention of whole packed rows by flash attention, of the package flash-attn or of torch."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.training.attention import SequenceBounds, VarlenKernel, attend_per_run, repeat_heads


def attend_on_gpu(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int
) -> Tensor:
    """Compute `attend_per_run` by the fastest installed kernel."""
    return cuda_kernel()(query, key, value, bounds, scale, window)


def attend_with_flash(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int,
    flash_attn_varlen_func: Callable[..., Any],
) -> Tensor:  # fmt: skip
    """Compute `attend_per_run` by the flash-attn package (2.4.1 or newer); 16-bit, CUDA only."""
    attended: Tensor = flash_attn_varlen_func(
        query, key, value, bounds.cu_seqlens, bounds.cu_keys,
        max(bounds.lengths), max(bounds.num_keys), softmax_scale=scale, causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return attended


def attend_with_torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int,
    varlen_attn: Callable[..., Any],
) -> Tensor:  # fmt: skip
    """Compute `attend_per_run` by torch's variable-length flash attention; 16-bit, CUDA only."""
    if not has_option(varlen_attn, "window_size"):
        return attend_with_torch_2_10(query, key, value, bounds, scale, window, varlen_attn)
    gqa_options = {}
    if has_option(varlen_attn, "enable_gqa"):  # torch 2.12 and newer
        gqa_options = {"enable_gqa": query.shape[1] != key.shape[1]}
    else:
        key, value = repeat_heads(query, key), repeat_heads(query, value)
    attended: Tensor = varlen_attn(
        query, key, value, bounds.cu_seqlens, bounds.cu_keys,
        max(bounds.lengths), max(bounds.num_keys), scale=scale,
        window_size=(window - 1 if window else -1, 0), **gqa_options,
    )  # fmt: skip
    return attended


def attend_with_torch_2_10(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int,
    varlen_attn: Callable[..., Any],
) -> Tensor:  # fmt: skip
    """Like `attend_with_torch_varlen`, by a kernel that has neither scale, window nor shared heads.

    It scales by 1/sqrt(head_dim). Another scale, or a window that hides something, is left to
    `attend_per_run`.
    """
    is_usual = math.isclose(scale, query.shape[-1] ** -0.5, rel_tol=1e-6)
    if not is_usual or 0 < window < max(bounds.num_keys):
        return attend_per_run(query, key, value, bounds, scale, window)
    attended: Tensor = varlen_attn(
        query, repeat_heads(query, key), repeat_heads(query, value), bounds.cu_seqlens,
        bounds.cu_keys, max(bounds.lengths), max(bounds.num_keys), is_causal=True,
    )  # fmt: skip
    return attended


@functools.cache
def has_option(kernel: Callable[..., Any], name: str) -> bool:
    """Return whether torch's kernel has a parameter, which depends on torch's version."""
    return name in inspect.signature(kernel).parameters


@functools.cache
def cuda_kernel() -> VarlenKernel:
    """Return the fastest installed kernel for 16-bit tensors on this process's GPU."""
    if torch.cuda.get_device_capability() < (8, 0):  # flash attention needs Ampere or newer
        return attend_per_run
    with contextlib.suppress(ImportError):
        # Import the function: any folder named flash_attn on the path imports as a package.
        from flash_attn import flash_attn_varlen_func  # noqa: PLC0415 - optional

        return functools.partial(attend_with_flash, flash_attn_varlen_func=flash_attn_varlen_func)
    with contextlib.suppress(ImportError):
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - newer torch only

        return functools.partial(attend_with_torch_varlen, varlen_attn=varlen_attn)
    return attend_per_run
