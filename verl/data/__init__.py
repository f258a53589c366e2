"""From question files to batches of prompts, recorded trajectories, and `python -m verl.data`.

This package knows neither tools nor Ray.
"""

from verl.data.prompts import (
    PromptSampler,
    Tokenizer,
    choose,
    load_prompts,
    num_batches,
    num_tokens,
    render,
)
from verl.data.rows import load_rows

__all__ = [
    "PromptSampler", "Tokenizer", "choose", "load_prompts", "load_rows", "num_batches",
    "num_tokens", "render",
]  # fmt: skip
