"""What of a transformer block's activations backward computes again instead of keeping it.

Of a block of Qwen2.5-3B, half of what autograd keeps are results of norms, rotation and activation:
many bytes that take hardly any arithmetic. `selective` computes those again and keeps the results
of matrix products and of attention. To compute attention alone again would spare a tenth
(docs/evidence/updates.md).
"""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from verl.config.policy import SELECTIVE

KEPT = ("aten.mm.", "aten.addmm.", "attention", "attn")
"""In the names of operations whose results are kept: products of matrices, and every kernel of
attention (torch's, flash-attn's) that is an operation of torch."""


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
