"""Recomputation of the activations of transformer blocks in backward.

Norms, rotary embedding, activation and residual sums are many small operations. In a block of
Qwen2.5-3B, half of what autograd saves are results of those: many bytes that take little arithmetic
to recompute. `selective` recomputes them and saves the results of matrix products and attention.
Recomputing attention alone would save a tenth of the memory (docs/evidence/updates.md).
"""

import functools
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from verl.config import Config
from verl.config.policy import SELECTIVE, BlocksConfig

SAVED_OPERATIONS = ("aten.mm.", "aten.addmm.", "attention", "attn")
"""Parts of the names of operations whose results `selective` saves: matrix products, and all
attention kernels (torch's, flash-attn's) that are torch operations."""


def transform(lm: PreTrainedModel, config: Config, trained: BlocksConfig | None) -> None:
    """Configure recomputation in the blocks of a model to train."""
    if trained is not None:
        recompute(lm, trained.enable_gradient_checkpointing)


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
