"""From question files to batches of prompts: rendering, sampling, and `python -m verl.data`.

Rows and their format are read in `verl.data.rows`. No tools and no Ray here.
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
