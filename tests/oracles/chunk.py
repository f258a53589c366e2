"""The trainer's log-probs and entropies for given logits instead of a model's."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from verl.training.models import LogProbModel


class GivenLogits(nn.Module):
    """A language model whose hidden states are its logits."""

    def get_output_embeddings(self) -> nn.Module:
        return nn.Identity()


def chunk_of_logits(
    logits: Tensor, labels: Sequence[int], temperature: float = 1.0, learn_entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies, (num_tokens,) each, by a chunk of `LogProbModel`."""
    model = LogProbModel(GivenLogits())
    return model._chunk(logits, torch.tensor(labels), temperature, learn_entropy)
