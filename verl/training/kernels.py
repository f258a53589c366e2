"""What a transformer block computes with around its attention and matrix products.

Norms, rotation, activation and sums are many small operations: torch.compile makes a few kernels of
them, and the package liger-kernel brings some for GPUs. Attention stays as it is: what it is given
differs with every micro-batch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from operator import attrgetter

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from verl.config import Config
from verl.config.policy import SELECTIVE
from verl.errors import ConfigError, explain
from verl.packages import version_of
from verl.training.attention import PACKED, packed_attention
from verl.training.devices import device_type
from verl.training.models import blocks

LIGER = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True, "cross_entropy": False,
         "fused_linear_cross_entropy": False}  # fmt: skip
"""Its kernels that a block can have; the head is ours."""
KEEP_NOTHING = {
    "compile": "which products a compiled block keeps is not seen",
    "liger": "liger's rotation writes over the products that are kept",
}
"""Kernels without `selective` recomputation, and why; autograd does not see what Triton writes."""


def use_kernels(lm: PreTrainedModel, kind: str) -> None:
    """Have the blocks of `lm` compute with `torch`, `compile` or `liger`."""
    if kind == "liger":
        apply_liger_kernel(lm, LIGER)
    elif kind == "compile":
        AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
        for block in blocks(lm, lm):
            # The forward alone, below FSDP's hooks and recomputation; for any number of tokens.
            block.forward = torch.compile(block.forward, dynamic=True)


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
        if device_type(config.trainer.device) == "cpu":
            expected = "torch or compile on a CPU: liger's are for GPUs"
            yield ConfigError(explain(key, "liger", expected, f"{key}=torch"))
        elif not version_of("liger-kernel"):
            fix = f"pip install liger-kernel, or {key}=compile"
            yield ConfigError(explain(key, "liger", "the package liger-kernel with it", fix))
