"""The trainer's log-probs and entropies of given logits, for comparisons with other libraries."""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.training.models import token_log_probs


def chunk_of_logits(
    logits: Tensor, labels: Sequence[int], temperature: float = 1.0, learn_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Return log-probs of `labels` and entropies, (num_labels,) each."""
    return token_log_probs(logits, torch.tensor(labels), temperature, learn_entropy)
