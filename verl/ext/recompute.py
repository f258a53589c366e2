"""`enable_gradient_checkpointing=selective`: cheap activations of blocks are recomputed.

Norms, rotary embedding, activation and residual sums are many small operations. In a block of
Qwen2.5-3B, half of what autograd saves are results of those: many bytes that take little arithmetic
to recompute. `selective` recomputes them and saves the results of matrix products and attention.
Recomputing attention alone would save a tenth of the memory (docs/evidence/updates.md).
"""

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

SAVED_OPERATIONS = ("aten.mm.", "aten.addmm.", "attention", "attn")
"""Parts of the names of operations whose results `selective` saves: matrix products, and all
attention kernels (torch's, flash-attn's) that are torch operations."""


def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a block's forward pass and of its recomputation."""
    forward, again = create_selective_checkpoint_contexts(selective_policy)
    return forward, again


def selective_policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide whether the result of a block's operation is saved or recomputed."""
    is_saved = any(part in str(operation) for part in SAVED_OPERATIONS)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
