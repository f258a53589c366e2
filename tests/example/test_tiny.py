"""The tiny random model that other tests use."""

import torch
from transformers import AutoModelForCausalLM

from example.tiny import tiny_llama, tiny_model


def test_the_same_seed_gives_the_same_model_and_leaves_the_random_state():
    """Equal seeds give equal weights, and the random state of the caller is unchanged."""
    before = torch.get_rng_state()
    first, second = tiny_llama(100), tiny_llama(100)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


class FourTokens:
    """A fake tokenizer with four tokens."""

    eos_token_id = 3

    def __len__(self):
        return 4

    def save_pretrained(self, folder):
        """Write nothing."""


def test_a_saved_model_loads_with_the_same_logits(tmp_path):
    """The folder is a complete Hugging Face model with the same logits."""
    tiny_model(tmp_path, 8, tokenizer=FourTokens())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[1, 5, 2]])
    assert torch.equal(loaded(ids).logits, tiny_llama(8, eos_token_id=3)(ids).logits)
