"""FLOPs against torch's own counter on real modules, and the peak FLOP/s of cards by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.core.batches import make_batch, make_groups
from tests.verl.training.ranks import VOCAB
from verl.config import AdapterConfig
from verl.config.policy import SELECTIVE
from verl.ext.flops import ModelFlops, peak_flops
from verl.ext.lora.model import AdaptedModel, Role
from verl.ext.model_shape import ModelShape
from verl.ext.speed import skipped_prompts
from verl.packing import PREFIXES, Packing, common_prefixes
from verl.training.attention import PACKED
from verl.training.models import LogProbModel, PackedInputs, ValueModel, recompute

LENGTHS = [12, 9, 17, 5]
RANK = 4
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 96, "intermediate_size": 250, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
CONFIGS = {
    "qwen2, tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "llama, head of its own": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "qwen3, wide heads": Qwen3Config(**SMALL | {"head_dim": 32}),
    "llama, a key for each query": LlamaConfig(**SMALL | {"num_key_value_heads": 6}),
}


def build(config: PretrainedConfig) -> tuple[PreTrainedModel, ModelShape]:
    lm = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)
    shape = ModelShape.of(config)
    return lm.train(), shape


def inputs() -> PackedInputs:
    batch = make_batch(LENGTHS)
    return PackedInputs.of(batch, batch.tokens["policy_mask"], torch.device("cpu"))


def counted(module: nn.Module, *arguments: Any) -> tuple[int, int]:
    """Return torch's count of a forward pass and of its backward pass.

    Attention is written as matrix products, since the counter does not see the CPU kernel. They
    compute the whole square of each sequence, of which a causal kernel computes half.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        answer = module(inputs(), *arguments)
        forward, seen = counter.get_total_flops(), attention(counter)
        (answer[0] if isinstance(answer, tuple) else answer).sum().backward()
    backward = counter.get_total_flops() - forward
    return forward - seen // 2, backward - (attention(counter) - seen) // 2


def attention(counter: FlopCounterMode) -> int:
    return counter.get_flop_counts()["Global"].get(torch.ops.aten.bmm, 0)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_policy_costs_what_torch_counts(name: str) -> None:
    """Forward and backward match exactly, with logits for target tokens only."""
    lm, shape = build(CONFIGS[name])
    flops, wanted = ModelFlops(shape), len(inputs().target_positions)
    assert 0 < wanted < sum(LENGTHS) - len(LENGTHS)
    expected = flops.forward(LENGTHS, wanted), flops.backward(LENGTHS, wanted)
    assert counted(LogProbModel(lm), 1.0) == expected


def test_a_shared_prompt_costs_what_torch_counts() -> None:
    """A forward pass without the skipped prompt copies costs what torch counts, but for attention.

    There, torch counts the whole rectangle of a response and its keys.
    """
    lm, shape = build(CONFIGS["qwen2, tied"])
    batch = make_groups([(7, [5, 2, 10]), (4, [1])])
    batch.columns[PREFIXES] = common_prefixes(batch)
    mask = batch.tokens["policy_mask"]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        LogProbModel(lm)(PackedInputs.of(batch, mask, torch.device("cpu")), 1.0)
    flops, lengths, wanted = ModelFlops(shape), batch.lengths.tolist(), int(mask.sum())
    found = flops.forward(lengths, wanted) - flops.forward(
        skipped_prompts(Packing.of(batch), 1, 100), 0
    )
    rectangles = sum(q * k for q, k in [(7, 7), (5, 12), (2, 9), (10, 17), (5, 5)])
    per_pair = 4 * shape.layers * shape.query_size
    assert attention(counter) == per_pair * rectangles
    halves = per_pair // 2 * (7**2 + 5**2 + sum((7 + r) ** 2 - 7**2 for r in (5, 2, 10)))
    assert found == counter.get_total_flops() - attention(counter) + halves


def test_prompts_are_skipped_where_ranks_share_them() -> None:
    """One of each group of a micro-batch is computed; a group may be split by rank or budget."""
    whole = Packing([8] * 9, [((i // 3, 6),) for i in range(9)])
    assert skipped_prompts(whole, 3, 24) == [6] * 6
    assert skipped_prompts(Packing([7] * 4, [((0, 4),)] * 4), 2, 15) == [4, 4]
    assert skipped_prompts(Packing([7] * 4, [()] * 4), 2, 15) == []


def test_a_critic_has_a_value_for_a_head() -> None:
    """The trunk, and one output for each target token."""
    lm, shape = build(CONFIGS["qwen2, tied"])
    flops, wanted = ModelFlops(shape, is_critic=True), len(inputs().target_positions)
    expected = flops.forward(LENGTHS, wanted), flops.backward(LENGTHS, wanted)
    assert counted(ValueModel(lm)) == expected


def test_selective_recomputation_repeats_no_matrix_product() -> None:
    """Only attention is recomputed, which consists of matrix products only in this test."""
    lm, shape = build(CONFIGS["qwen2, tied"])
    recompute(lm, SELECTIVE)
    flops, wanted = ModelFlops(shape), len(inputs().target_positions)
    backward = flops.backward(LENGTHS, wanted) + flops._attention(LENGTHS)
    assert counted(LogProbModel(lm), 1.0) == (flops.forward(LENGTHS, wanted), backward)


@pytest.mark.parametrize("name", ["qwen2, tied", "llama, head of its own"])
def test_recomputed_flops_are_counted_separately(name: str) -> None:
    """The model FLOPs stay the same; the backward pass is longer by `recomputed`."""
    lm, shape = build(CONFIGS[name])
    lm.gradient_checkpointing_enable({"use_reentrant": False})
    flops, wanted = ModelFlops(shape, has_checkpointing=True), len(inputs().target_positions)
    backward = flops.backward(LENGTHS, wanted) + flops.recomputed(LENGTHS)
    assert counted(LogProbModel(lm), 1.0) == (flops.forward(LENGTHS, wanted), backward)


def test_chunked_logits_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks but the last, which is kept; their tokens are `recomputed`'s `num_targets`."""
    monkeypatch.setattr("verl.training.models.LOGITS_PER_CHUNK", 8 * VOCAB)
    lm, shape = build(CONFIGS["qwen2, tied"])
    flops, wanted = ModelFlops(shape), len(inputs().target_positions)
    backward = flops.backward(LENGTHS, wanted) + flops.recomputed(LENGTHS, wanted - 8)
    assert counted(LogProbModel(lm), 1.0) == (flops.forward(LENGTHS, wanted), backward)


@pytest.mark.parametrize("role", [Role.ACTOR, Role.CRITIC])
def test_below_an_adapter_frozen_weights_cost_half_the_backward(role: Role) -> None:
    """Except the first block's q, k and v: nothing before them is trained."""
    lm, shape = build(CONFIGS["qwen2, tied"])
    module = AdaptedModel(lm, {role: AdapterConfig(lora_rank=RANK)})
    module.use(role)
    flops, wanted = (
        ModelFlops(shape, role is Role.CRITIC, shape.adapter(RANK)),
        len(inputs().target_positions),
    )
    forward, backward = counted(module, *([1.0] if role is Role.ACTOR else []))
    kv_size = shape.kv_heads * shape.head_dim
    to_qkv = shape.hidden * (shape.query_size + 2 * kv_size) + 3 * shape.hidden * RANK
    assert forward == flops.forward(LENGTHS, wanted)
    assert backward == flops.backward(LENGTHS, wanted) - 2 * to_qkv * sum(LENGTHS)


@pytest.mark.parametrize(
    ("card", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 PCIe", "float16", 756),
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla T4", "float16", 65),
        ("Tesla T4", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3", "float32", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA A10G", "bfloat16", None),
        ("NVIDIA GH200 480GB", "bfloat16", None),
        ("", "float32", None),
    ],
)
def test_a_card_is_known_by_its_name(card: str, dtype: str, tera: float | None) -> None:
    """By torch's names; MIG slices, slower variants and unknown cards have no peak."""
    assert peak_flops(card, dtype) == (None if tera is None else tera * 1e12)
