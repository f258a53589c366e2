"""Attention with a soft cap (Gemma 2) or sinks (gpt-oss), which no fused kernel computes."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.training.attention import SequenceBounds, causal_mask, repeat_heads


def attend(
    query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scale: float, window: int,
    *, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `attend_per_run` with such scores, in float32 or finer.

    `softcap` is the bound of the scaled scores: softcap · tanh(score / softcap). `sinks` (heads,)
    are a score of each head that takes part in the softmax and has no value.
    """
    key, value = repeat_heads(query, key), repeat_heads(query, value)
    runs = zip(*(x.transpose(0, 1).split(sizes, dim=1) for x, sizes in (
        (query, bounds.lengths), (key, bounds.num_keys), (value, bounds.num_keys)
    )), strict=True)  # fmt: skip
    outputs = []
    for q, k, v in runs:
        logits = q @ k.transpose(1, 2)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits + causal_mask(q.shape[1], k.shape[1], window, logits)
        if sinks is not None:
            column = sinks.to(logits.dtype)[:, None, None].expand(-1, q.shape[1], 1)
            weights = torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        outputs.append(weights.to(v.dtype) @ v)
    return torch.cat(outputs, dim=1).transpose(0, 1)
