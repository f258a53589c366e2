"""Attention over packed sequences: one row of tokens holds many sequences without padding.

Importing this module registers `PACKED` with transformers. A model whose attention
implementation is `PACKED` takes batch size 1, `position_ids` that restart at each sequence, and
the `SequenceBounds` of the row as the keyword `bounds`, which transformers passes on to every
layer. No mask is built: transformers builds none for an implementation it does not know.

Several responses may follow a single copy of their prompt, or of more that they have in common.
Everything else in a layer works token by token; only attention lets a response see its prompt, by
copying the prompt's keys and values in front of the response's own.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from verl.errors import ModelError, explain
from verl.plugins import imported
from verl.training.devices import to_device

PACKED = "verl_packed"
HALF = (torch.bfloat16, torch.float16)

Span = tuple[int, int]
"""First and end position, in its sequence, of a run of tokens in the row. A run that starts at a
position p > 0 follows the last run before it that ends at p, and what that one follows."""


@dataclass(frozen=True)
class SequenceBounds:
    """Where the runs of a packed row begin and end, and which tokens each of them sees."""

    spans: tuple[Span, ...]
    """Positions of each run in its sequence; it sees all tokens of the sequence before its end."""
    cu_seqlens: Tensor
    """(num_spans + 1,) int32 on the model's device: offsets of the runs in the row."""
    cu_keys: Tensor
    """(num_spans + 1,) int32: offsets of the runs' keys in the result of `keys_of`."""

    @classmethod
    def of(cls, spans: Sequence[Span], device: torch.device) -> Self:
        """Build the bounds of runs with these positions."""
        queries, keys = (
            to_device(torch.tensor([0, *sizes]).cumsum(0, dtype=torch.int32), device)
            for sizes in ([end - start for start, end in spans], [end for _, end in spans])
        )
        return cls(tuple(spans), queries, keys)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each run, all positive."""
        return [end - start for start, end in self.spans]

    @property
    def num_keys(self) -> list[int]:
        """Keys of each run: its own tokens and those that it follows."""
        return [end for _, end in self.spans]

    @property
    def position_ids(self) -> Tensor:
        """(1, num_tokens) positions in the sequences."""
        positions = torch.cat([torch.arange(*span) for span in self.spans])[None]
        return to_device(positions, self.cu_seqlens.device)

    @functools.cached_property
    def paths(self) -> list[list[int]]:
        """For each run, the numbers of the runs that it follows, in order, and its own."""
        paths, path = [], list[int]()
        for number, (start, _) in enumerate(self.spans):
            while path and self.spans[path[-1]][1] != start:
                path.pop()
            path.append(number)
            paths.append([*path])
        return paths

    def keys_of(self, x: Tensor) -> Tensor:
        """Insert the rows of `x` (num_tokens, ...) that each run follows before its own."""
        if all(start == 0 for start, _ in self.spans):
            return x
        parts = x.split(self.lengths)
        return torch.cat([parts[number] for path in self.paths for number in path])


RunKernel = Callable[[Tensor, Tensor, Tensor, float, int], Tensor]
VarlenKernel = Callable[[Tensor, Tensor, Tensor, SequenceBounds, float, int], Tensor]

FAST = {
    "cuda": "verl.ext.flash_attention:attend_on_gpu",
    "cpu": "verl.ext.cpu.attention:attend_short_runs",
}
"""Import paths of kernels for 16-bit tensors; without the module, each run is computed alone."""
PLAIN = "verl.ext.plain_attention:attend"
"""Import path of what computes scores that no fused kernel does: with a soft cap or sinks."""
RUN_KERNELS: dict[str, Callable[..., Tensor]] = {}
"""What is called in the place of `scaled_dot_product_attention` on a type of device."""
SHORT = 256
"""Up to this many keys, kernels process all of them at once, even those that the mask hides."""


def attend_run(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    """Return attention, (1, heads, length, head_dim), of a run whose last token sees all keys."""
    length, num_keys = query.shape[2], key.shape[2]
    before = num_keys - length
    is_limited = 0 < window < num_keys
    if 0 < before < length and num_keys > SHORT and not is_limited:
        # Kernels skip what a causal square hides, but compute what a mask hides. So pad the
        # queries to a square, which costs less than a mask.
        query = pad(query, (0, 0, before, 0))
        return attend_run(query, key, value, scale, window)[:, :, before:]
    mask = causal_mask(length, num_keys, window, query) if before or is_limited else None
    kernel = RUN_KERNELS.get(query.device.type, scaled_dot_product_attention)
    return kernel(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def causal_mask(length: int, num_keys: int, window: int, like: Tensor) -> Tensor:
    """Return the causal mask of the last `length` of `num_keys` tokens, (length, num_keys).

    It is 0 where a token sees a key, itself included and at most `window` keys, else -inf; dtype
    and device are those of `like`.
    """
    before = num_keys - length
    visible = torch.ones(length, num_keys, dtype=torch.bool, device=like.device).tril(before)
    visible = visible.triu(before + 1 - window) if window else visible
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, -torch.inf)


def attend_per_run(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int,
    attend: RunKernel = attend_run,
) -> Tensor:  # fmt: skip
    """Compute causal attention run by run, each by `attend`.

    `query` and the result are (num_tokens, heads, head_dim); `key` and `value` are the results of
    `keys_of`, (num_keys, key-value heads, head_dim). A `window` of 0 means unlimited.
    """
    if query.is_cuda:  # the memory-efficient CUDA kernel does not support shared key-value heads
        key, value = repeat_heads(query, key), repeat_heads(query, value)
    sizes = (bounds.lengths, bounds.num_keys, bounds.num_keys)
    parts = [
        torch.split(x.transpose(0, 1)[None], size, dim=2)
        for x, size in zip((query, key, value), sizes, strict=True)
    ]
    outputs = [attend(q, k, v, scale, window) for q, k, v in zip(*parts, strict=True)]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def repeat_heads(query: Tensor, x: Tensor) -> Tensor:
    """Repeat the heads of `x` (num_tokens, key-value heads, head_dim) to as many as `query` has."""
    repeats = query.shape[1] // x.shape[1]
    return x.repeat_interleave(repeats, dim=1) if repeats > 1 else x


@functools.cache
def fast_kernel(device: str) -> VarlenKernel:
    """Return the fastest kernel for 16-bit tensors on a type of device."""
    with contextlib.suppress(ModuleNotFoundError):
        kernel: VarlenKernel = imported(FAST[device])
        return kernel
    return attend_per_run


IGNORED = frozenset({"dropout", "position_ids", "is_causal", "use_cache", "cache_position"})
"""Arguments of the attention call without effect here: dropout, since there was none in sampling;
positions, which have been applied to queries and keys; what a cache needs; and `is_causal` unless
it is False."""


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, bounds: SequenceBounds | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute a layer's attention, as transformers calls it.

    Takes (1, heads, num_tokens, head_dim) and returns (1, num_tokens, heads, head_dim). `softcap`
    and `s_aux` (sinks): see `PLAIN`. Raises ModelError for any other argument that changes the
    result.
    """
    refuse_unknown(module, others)
    assert bounds is not None, f"{PACKED} needs `bounds`: call the model with a SequenceBounds"
    assert attention_mask is None, f"{PACKED} takes no mask, got {attention_mask.shape}"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    key, value = bounds.keys_of(key), bounds.keys_of(value)
    kernel = choose_kernel(query, value, softcap, s_aux)
    attended = kernel(query, key, value, bounds, scale, sliding_window or 0)
    return attended.contiguous()[None], None  # some families call `view`


def choose_kernel(
    query: Tensor, value: Tensor, softcap: float | None = None, sinks: Tensor | None = None
) -> VarlenKernel:
    """Return the fastest kernel that computes such scores."""
    if softcap is not None or sinks is not None:
        return functools.partial(imported(PLAIN), softcap=softcap, sinks=sinks)
    is_even = query.shape[-1] == value.shape[-1]  # it is not in multi-head latent attention
    if query.dtype not in HALF or not is_even:
        return attend_per_run
    return fast_kernel("cuda" if query.is_cuda else "cpu")


def refuse_unknown(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raise ModelError for arguments of the attention call that would change its result."""
    asked = {name: value for name, value in arguments.items() if value is not None}
    if asked.get("is_causal") is False:
        given = "is_causal=False"
    else:
        unknown = [n for n, v in asked.items() if n not in IGNORED and v is not False]
        if not unknown:
            return
        given = ", ".join(unknown)
    expected = "attention by scale, causal mask, window, soft cap and sinks"
    fix = "train a model of another family (docs/guides/models.md)"
    raise ModelError(explain(f"attention of {type(module).__name__}", given, expected, fix))


AttentionInterface.register(PACKED, packed_attention)
