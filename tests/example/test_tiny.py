"""The tiny model of the mechanics' tests."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from example.tiny import tiny_llama, tiny_model


def test_the_same_seed_gives_the_same_model_and_leaves_the_random_state():
    """Tests that share the model agree, and building it disturbs nobody."""
    before = torch.get_rng_state()
    first, second = tiny_llama(100), tiny_llama(100)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_the_default_size_is_between_one_and_eight_million():
    """Large enough for the real vocabulary, small enough to be built in a moment."""
    assert 1e6 < sum(p.numel() for p in tiny_llama().parameters()) < 8e6


class FourTokens:
    """A stand-in tokenizer with four tokens."""

    eos_token_id = 3

    def __len__(self):
        return 4

    def save_pretrained(self, folder):
        """Write nothing."""


def test_a_saved_model_loads_with_the_same_logits(tmp_path):
    """The folder is a complete Hugging Face model."""
    tiny_model(tmp_path, 8, tokenizer=FourTokens())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[1, 5, 2]])
    assert torch.equal(loaded(ids).logits, tiny_llama(8, eos_token_id=3)(ids).logits)


def test_a_vocabulary_below_the_tokenizers_is_refused(tmp_path):
    """Ids past the embedding would fail far from the cause."""
    with pytest.raises(ValueError, match="expected at least the tokenizer's 4"):
        tiny_model(tmp_path, 3, tokenizer=FourTokens())
