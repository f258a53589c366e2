"""Kernels of transformer blocks, and recomputation of their activations in backward.

Norms, rotary embedding, activation and residual sums are many small operations, for which the
package liger-kernel has a few kernels for GPUs.

In a block of Qwen2.5-3B, half of what autograd saves are results of those small operations: many
bytes that take little arithmetic to recompute. `selective` recomputes them and saves the results of
matrix products and attention. Recomputing attention alone would save a tenth of the memory
(docs/evidence/updates.md).
"""

import functools
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.integrations.liger import apply_liger_kernel

from verl.config import Config
from verl.config.policy import SELECTIVE, BlocksConfig
from verl.errors import ConfigError, explain
from verl.nvidia import version_of
from verl.training.devices import is_surely_cpu

LIGER = {"rope": True, "rms_norm": True, "swiglu": True, "geglu": True, "cross_entropy": False,
         "fused_linear_cross_entropy": False}  # fmt: skip
"""Options of `apply_liger_kernel`: kernels of blocks, but not of the head, which is our own."""
NOT_SELECTIVE = {"liger": "liger's rotary kernel overwrites the products that are saved"}
"""Kernels without `selective` recomputation, and why. Autograd does not see what Triton writes."""
SAVED_OPERATIONS = ("aten.mm.", "aten.addmm.", "attention", "attn")
"""Parts of the names of operations whose results `selective` saves: matrix products, and all
attention kernels (torch's, flash-attn's) that are torch operations."""


def transform(lm: PreTrainedModel, config: Config, trained: BlocksConfig | None) -> None:
    """Configure the kernels of the blocks of `lm` and, in a model to train, recomputation."""
    use_kernels(lm, config.actor_rollout_ref.model.kernels)
    if trained is not None:
        recompute(lm, trained.enable_gradient_checkpointing)


def use_kernels(lm: PreTrainedModel, kind: str) -> None:
    """Let the blocks of `lm` use the kernels of `torch` or `liger`."""
    if kind == "liger":
        apply_liger_kernel(lm, LIGER)


def recompute(lm: PreTrainedModel, mode: bool | str | None) -> None:
    """Let backward recompute all activations of a block (True), none, or the `selective` ones."""
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == SELECTIVE:
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, selective_policy
        )
    if mode:
        lm.gradient_checkpointing_enable(options)


def selective_policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide whether the result of a block's operation is saved or recomputed."""
    is_saved = any(part in str(operation) for part in SAVED_OPERATIONS)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def problems(config: Config) -> Iterator[ConfigError]:
    """Yield an error for the kernels of policy and critic if they cannot be used."""
    key = "actor_rollout_ref.model.kernels"
    kind = config.actor_rollout_ref.model.kernels
    for section in ("actor_rollout_ref.model", "critic.model"):
        recompute_key = f"{section}.enable_gradient_checkpointing"
        if kind in NOT_SELECTIVE and attrgetter(recompute_key)(config) == SELECTIVE:
            expected = f"true or false: {NOT_SELECTIVE[kind]}"
            yield ConfigError(explain(recompute_key, SELECTIVE, expected, f"{key}=torch"))
    if kind == "liger":
        if is_surely_cpu(config.trainer.device):
            expected = "torch on a CPU: liger's kernels are for GPUs"
            yield ConfigError(explain(key, "liger", expected, f"{key}=torch"))
        elif not version_of("liger-kernel"):
            fix = f"pip install liger-kernel, or {key}=torch"
            yield ConfigError(explain(key, "liger", "an installed package liger-kernel", fix))
