"""Packed attention against the models' own attention on one sequence at a time."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from verl.workers.attention import PACKED, SequenceBounds, attend_one_by_one

LENGTHS = [7, 1, 12, 4]
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("config", "model"),
    [(LlamaConfig, LlamaForCausalLM), (Qwen2Config, Qwen2ForCausalLM)],
    ids=["llama", "qwen2"],
)
def test_packed_logits_equal_one_by_one(config: type, model: type) -> None:
    """A token sees its own sequence's prefix and nothing of its neighbours."""
    torch.manual_seed(0)
    plain = model(config(**SIZES, initializer_range=0.2, attn_implementation="eager")).eval()
    ids = torch.randint(0, 61, (1, sum(LENGTHS)))
    expected = torch.cat([plain(part).logits for part in ids.split(LENGTHS, dim=1)], dim=1)
    plain.set_attn_implementation(PACKED)
    bounds = SequenceBounds.of(LENGTHS, torch.device("cpu"))
    packed = plain(ids, position_ids=bounds.position_ids, bounds=bounds, use_cache=False).logits
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-5)


def test_a_window_limits_what_a_token_sees() -> None:
    """Sliding-window attention equals softmax over the last `window` tokens, by hand."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, 1, 8) for _ in range(3))
    found = attend_one_by_one(q, k, v, SequenceBounds.of([9], torch.device("cpu")), 0.5, 3)
    for t in range(9):
        seen = slice(max(0, t - 2), t + 1)
        weights = torch.softmax(0.5 * k[seen, 0] @ q[t, 0], 0)
        torch.testing.assert_close(found[t, 0], weights @ v[seen, 0])


def test_calling_without_bounds_says_so() -> None:
    """A forward that forgot its bounds is a bug that names itself."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=PACKED))
    with pytest.raises(AssertionError, match="SequenceBounds"):
        model(torch.zeros(1, 3, dtype=torch.int64))
