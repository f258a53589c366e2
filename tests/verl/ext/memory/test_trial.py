"""A measurement on meta tensors equals what autograd keeps, at any depth."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen2Config

from verl.config.policy import SELECTIVE
from verl.ext.memory import trial
from verl.ext.memory.trial import Pass, activation_bytes
from verl.ext.model_shape import ModelShape
from verl.training.attention import PACKED, SequenceBounds
from verl.training.models import LOGITS_PER_CHUNK

SMALL = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 7,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
PASS = Pass(ModelShape.of(Qwen2Config(**SMALL)), 300, 40, "bfloat16")
WAYS = {
    "forward": PASS,
    "update": dataclasses.replace(PASS, has_backward=True),
    "recomputed": dataclasses.replace(PASS, has_backward=True, recompute=True),
    "selective": dataclasses.replace(PASS, has_backward=True, recompute=SELECTIVE),
    "critic": dataclasses.replace(PASS, has_backward=True, is_critic=True),
    "adapter": dataclasses.replace(PASS, has_backward=True, recompute=True, lora_rank=4),
    "gemma": dataclasses.replace(PASS, shape=ModelShape.of(Gemma2Config(**SMALL, head_dim=16))),
}


@pytest.mark.parametrize("way", WAYS)
def test_two_depths_predict_all_depths(way: str) -> None:
    """Measuring the whole model gives the same, for any architecture."""
    work = WAYS[way]
    assert activation_bytes(work) == trial._at_depth(work, work.shape.layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_one_more_block_adds_what_autograd_keeps_for_it(dtype: str, recompute: bool) -> None:
    """Counted by hooks on the tensors that a real forward pass saves."""
    work = dataclasses.replace(PASS, dtype=dtype, has_backward=True, recompute=recompute)
    more = trial._at_depth(work, 6) - trial._at_depth(work, 5)
    assert more == saved(work, 6) - saved(work, 5)


def saved(work: Pass, layers: int) -> int:
    """Return the bytes of the tensors that autograd saves in a packed forward, without weights."""
    config = Qwen2Config(**SMALL | {"num_hidden_layers": layers})
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)
    lm = lm.to(getattr(torch, work.dtype)).train()
    if work.recompute:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    weights = {p.untyped_storage().data_ptr() for p in lm.parameters()}
    held: list[Tensor] = []
    bounds = SequenceBounds.of([(0, 40)] * 7 + [(0, 20)], torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: held.append(x) or x, lambda x: x
    ):  # the list keeps them alive, so that no address is used twice
        out = lm.get_decoder()(
            input_ids=torch.arange(300)[None] % 200, position_ids=bounds.position_ids,
            use_cache=False, bounds=bounds,
        )  # fmt: skip
    assert out.last_hidden_state.requires_grad
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    return sum(n for address, n in storages.items() if address not in weights)


def test_a_selective_block_keeps_the_results_of_products_and_attention() -> None:
    """A selective block keeps as many bytes per token as the formula says.

    These are the block's input, query, key, value, the attention's output and its log-sum-exp per
    head, and the results of the four other matrices.
    """
    work = dataclasses.replace(WAYS["selective"], dtype="float32")
    more = trial._at_depth(work, 6) - trial._at_depth(work, 5)
    hidden, keys, inner, heads = 64, 32, 160, 4
    assert more == 4 * 300 * (5 * hidden + 2 * keys + 2 * inner + heads)


@pytest.mark.parametrize("way", ["forward", "update", "recomputed", "critic", "adapter"])
def test_a_sequence_parallel_group_divides_the_activations(way: str) -> None:
    """Two ranks have half each and what they exchange; their two key heads suffice for both."""
    alone = dataclasses.replace(WAYS[way], tokens=3000, longest=400)
    half = activation_bytes(dataclasses.replace(alone, ranks_per_shard=2)) / activation_bytes(alone)
    assert 0.5 <= half < 0.6


def test_logits_stop_growing_at_a_chunk() -> None:
    """With twice the tokens, memory grows far less than twice if it is mostly logits."""
    facts = SMALL | {"vocab_size": 1 << 18, "hidden_size": 16, "intermediate_size": 16}
    shape = ModelShape.of(Qwen2Config(**facts | {"head_dim": 16}))
    full = LOGITS_PER_CHUNK // shape.vocab
    once, twice = (activation_bytes(Pass(shape, n * full, n * full, "bfloat16")) for n in (1, 2))
    assert once > 8 * LOGITS_PER_CHUNK and twice < 1.1 * once


def test_a_temperature_costs_a_copy_of_the_logits() -> None:
    """300 tokens of 200 float32 values."""
    hot = dataclasses.replace(PASS, temperature=0.5, dtype="float32")
    plain = dataclasses.replace(hot, temperature=1.0)
    assert activation_bytes(hot) >= activation_bytes(plain)
