"""Low-rank adapters: what may be trained instead of all weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl.config.option import option

ALL_LINEAR = "all-linear"
VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can reserve room for; an adapter takes the next larger."""


@dataclass
class AdapterConfig:
    """A LoRA adapter: each chosen matrix W acts as W + lora_alpha / lora_rank · B A."""

    lora_rank: int = option(0, resume="fixed", ge=0, le=512)
    """Rank of A and B; 0 trains all weights and has no adapter."""
    lora_alpha: float = option(16.0, resume="fixed", gt=0)
    """Numerator of the adapter's scale; twice the rank is usual."""
    target_modules: Any = option(ALL_LINEAR, resume="fixed")
    """all-linear (every linear layer but the output head), or a list such as [q_proj,v_proj]."""

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter is trained, and the weights below it stay as they are."""
        return self.lora_rank > 0
