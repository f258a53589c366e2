"""What a transformer block computes with, and what of it backward computes again.

Norms, rotation, activation and sums are many small operations: torch.compile makes a few kernels of
them, and the package liger-kernel brings some for GPUs. Attention stays as it is: what it is given
differs with every micro-batch.

Of a block of Qwen2.5-3B, half of what autograd keeps are results of those operations: many bytes
that take hardly any arithmetic. `selective` computes them again and keeps the results of matrix
products and of attention. To compute attention alone again would spare a tenth
(docs/evidence/updates.md).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from verl.config import Config, CriticModelConfig, ModelConfig
from verl.config.policy import SELECTIVE
from verl.errors import ConfigError, explain
from verl.nvidia import version_of
from verl.training.attention import PACKED, packed_attention
from verl.training.devices import is_surely_cpu
from verl.training.models import blocks

LIGER = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True, "cross_entropy": False,
         "fused_linear_cross_entropy": False}  # fmt: skip
"""Its kernels that a block can have; the head is ours."""
KEEP_NOTHING = {
    "compile": "which products a compiled block keeps is not seen",
    "liger": "liger's rotation writes over the products that are kept",
}
"""Kernels without `selective` recomputation, and why; autograd does not see what Triton writes."""
KEPT = ("aten.mm.", "aten.addmm.", "attention", "attn")
"""In the names of operations whose results `selective` keeps: products of matrices, and every
kernel of attention (torch's, flash-attn's) that is an operation of torch."""


def prepare_blocks(lm: PreTrainedModel, config: ModelConfig | CriticModelConfig) -> None:
    """Have the blocks of `lm` compute, and recompute, as is configured."""
    use_kernels(lm, config.kernels)
    recompute(lm, config.enable_gradient_checkpointing)


def use_kernels(lm: PreTrainedModel, kind: str) -> None:
    """Have the blocks of `lm` compute with `torch`, `compile` or `liger`."""
    if kind == "liger":
        apply_liger_kernel(lm, LIGER)
    elif kind == "compile":
        AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
        for block in blocks(lm, lm):
            # The forward alone, below FSDP's hooks and recomputation; for any number of tokens.
            block.forward = torch.compile(block.forward, dynamic=True)


def recompute(lm: PreTrainedModel, what: bool | str | None) -> None:
    """Have the blocks of `lm` recompute in backward all (True), nothing, or what is cheap
    (`selective`)."""
    options: dict[str, Any] = {"use_reentrant": False}
    if what == SELECTIVE:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    if what:
        lm.gradient_checkpointing_enable(options)


def policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether the result of an operation of a block is kept."""
    is_kept = any(part in str(operation) for part in KEPT)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def compile_seconds() -> float:
    """What this process has spent on compiling so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # which takes a second to import
    return 0.0 if dynamo is None else float(dynamo.calculate_time_spent()["total_wall_time"])


def kernel_problems(config: Config) -> Iterator[ConfigError]:
    """Why a model's blocks cannot compute with what its options name."""
    for section in ("actor_rollout_ref.model", "critic.model"):
        key, recomputed = f"{section}.kernels", f"{section}.enable_gradient_checkpointing"
        kind = attrgetter(key)(config)
        if kind in KEEP_NOTHING and attrgetter(recomputed)(config) == SELECTIVE:
            expected = f"true or false: {KEEP_NOTHING[kind]}"
            yield ConfigError(explain(recomputed, SELECTIVE, expected, f"{key}=torch"))
        if kind != "liger":
            continue
        if is_surely_cpu(config.trainer.device):
            expected = "torch or compile on a CPU: liger's are for GPUs"
            yield ConfigError(explain(key, "liger", expected, f"{key}=torch"))
        elif not version_of("liger-kernel"):
            fix = f"pip install liger-kernel, or {key}=compile"
            yield ConfigError(explain(key, "liger", "the package liger-kernel with it", fix))
