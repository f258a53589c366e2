"""A tiny Llama with random weights, for tests that do not depend on what a model can do."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from example.model import load_tokenizer

NUM_LAYERS = 2
HIDDEN_SIZE = 128  # heads of 32, the smallest that vLLM serves on CPU
SMOLLM2_VOCAB_SIZE = 49152


def tiny_llama(
    vocab_size: int = SMOLLM2_VOCAB_SIZE,
    *,
    hidden_size: int = HIDDEN_SIZE,
    num_layers: int = NUM_LAYERS,
    eos_token_id: int = 2,
    tie_word_embeddings: bool = True,
    initializer_range: float = 0.1,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Return a seeded random model with 4 heads and 2 key-value heads; default: 6.6M parameters.

    With the default `initializer_range` the logits are far enough from uniform for meaningful
    comparisons; use a smaller value for a model to be trained. Does not change the random state of
    the caller.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=8192,
        initializer_range=initializer_range,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=1,
        eos_token_id=eos_token_id,
        pad_token_id=eos_token_id,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def tiny_model(
    out_dir: Path,
    vocab_size: int = SMOLLM2_VOCAB_SIZE,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    seed: int = 0,
) -> Path:
    """Write a tiny model and a tokenizer (default: SmolLM2's) to a Hugging Face folder."""
    tokenizer = tokenizer or load_tokenizer()
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"got vocab_size {vocab_size}, expected at least the tokenizer's {len(tokenizer)}: "
            f"leave it out or give a smaller tokenizer"
        )
    tiny_llama(vocab_size, eos_token_id=tokenizer.eos_token_id, seed=seed).save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return out_dir
