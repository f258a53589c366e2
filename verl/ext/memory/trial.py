"""Measures the memory of a packed forward (and backward) pass, apart from weights and gradients.

The model that the ranks run is executed on meta tensors (shapes without data) at two depths, and
`PeakTracker` counts the bytes; each further block is assumed to add as much as the last one did.
"""

import copy
import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from verl.ext.model_shape import ModelShape
from verl.plugins import imported
from verl.training.attention import PACKED, RUN_KERNELS, SequenceBounds
from verl.training.devices import DTYPES
from verl.training.loading import replace_parameters
from verl.training.models import LogProbModel, PackedInputs, ValueModel, recompute

DEPTHS = (2, 3)
"""Numbers of blocks to measure; not 1, since the first block differs from those after it."""


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one model."""

    shape: ModelShape
    tokens: int
    longest: int
    """Tokens of each sequence; the last one may be shorter, so that they sum up to `tokens`."""
    dtype: str
    is_critic: bool = False
    has_backward: bool = False
    recompute: bool | str = False
    """Gradient checkpointing: a value of `enable_gradient_checkpointing`."""
    lora_rank: int = 0
    ranks_per_shard: int = 1
    """Ranks that compute the tokens together; one of them is measured."""
    temperature: float = 1.0


@functools.cache
def activation_bytes(work: Pass) -> int:
    """Return the peak bytes of a pass."""
    layers = work.shape.layers
    if layers <= DEPTHS[1]:
        return _at_depth(work, layers)
    shallow, deep = (_at_depth(work, depth) for depth in DEPTHS)
    return shallow + (deep - shallow) * (layers - DEPTHS[0])


def _at_depth(work: Pass, layers: int) -> int:
    with torch.device("meta"):  # four times as fast as torch's FakeTensorMode
        model = _model(work, layers)
        _cast_parameters(model, DTYPES[work.dtype])
        trained = [p for p in model.parameters() if work.has_backward and p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        inputs, forward = _inputs(work), model
        if work.ranks_per_shard > 1:
            one_of = imported("verl.ext.sequence_parallel:as_lone_rank")
            inputs, forward = one_of(inputs, model, work.ranks_per_shard)
        held = [*model.parameters(), *model.buffers(), *(p.grad for p in trained)]
        tracker = PeakTracker(held)
        with tracker, torch.set_grad_enabled(work.has_backward):
            output = forward(inputs) if work.is_critic else forward(inputs, work.temperature)[0]
            if work.has_backward:
                output.sum().backward()
    return tracker.peak


def attend_on_meta(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None, is_causal: bool,
    scale: float, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Compute attention by the fused kernel of the CPU, which torch would not choose on meta."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attended: Tensor = fused(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return attended


RUN_KERNELS["meta"] = attend_on_meta


class StorageTracker(TorchDispatchMode):
    """Reports the storages that operations create within its context, and when they are freed.

    torch's own MemTracker fails on parameters without gradients, such as those below an adapter.
    """

    def __init__(self, known: Iterable[Tensor | None]) -> None:
        """Start tracking; tensors in `known` and views of them are not reported."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_created = 0
        self._seen: dict[int, Any] = {id(x.untyped_storage()): x for x in known if x is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self._watch(value.untyped_storage())
        return result

    def changed(self, number: int, num_bytes: int) -> None:
        """Note that storage `number` (from 0) was created, or freed if `num_bytes` is negative."""
        raise NotImplementedError

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size, number = id(storage), storage.nbytes(), self._num_created
        if key in self._seen:
            return
        self._num_created += 1
        self.changed(number, size)

        def on_free(_: object) -> None:
            self.changed(number, -size)
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, on_free)


class PeakTracker(StorageTracker):
    """Tracks the peak bytes of the storages."""

    live = peak = 0

    def changed(self, number: int, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)


def _model(work: Pass, layers: int) -> nn.Module:
    config = copy.deepcopy(work.shape.config)
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED).train()
    recompute(lm, work.recompute)
    if work.lora_rank:
        role = "critic" if work.is_critic else "actor"
        kind = imported("verl.ext.lora.model:AdaptedModel")
        adapted: nn.Module = kind.of_rank(lm, role, work.lora_rank)
        return adapted
    return ValueModel(lm) if work.is_critic else LogProbModel(lm)


def _cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Give all parameters the `dtype` that FSDP computes in; the buffers keep theirs."""
    replace_parameters(
        model, lambda p: nn.Parameter(torch.empty(p.shape, dtype=dtype), p.requires_grad)
    )


def _inputs(work: Pass) -> PackedInputs:
    """Build inputs whose targets are all tokens but the first."""
    full, rest = divmod(work.tokens, work.longest)
    spans = ((0, work.longest),) * full + (((0, rest),) if rest else ())
    offsets = torch.zeros(len(spans) + 1, dtype=torch.int32)
    ids, targets = torch.zeros(1, work.tokens, dtype=torch.int64), torch.arange(1, work.tokens)
    bounds = SequenceBounds(spans, offsets, offsets)
    return PackedInputs(ids, bounds, targets, ids[0, targets], targets - 1)
