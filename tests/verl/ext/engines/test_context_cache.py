"""The transformers engine samples with the model's own log-probs, whatever its cache can do."""

# ruff: noqa: E501 - a table reads best with a family a line
from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertLMHeadModel

from tests.fakes import EOS, ByteTokenizer
from tests.verl.ext.engines.test_transformers import Latin, own_log_probs
from verl.errors import ModelError
from verl.ext.engines.context_cache import ContextCache, Reuse
from verl.ext.engines.transformers import TransformersEngine
from verl.types import Sampling

VOCABULARY = 258
BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.15,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_chunk_size": 4,
}  # fmt: skip
MIXED = {"mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False}
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
WINDOW = {"sliding_window": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": WINDOW, "cohere2": WINDOW, "olmo3": WINDOW,
    "gpt_oss": WINDOW | EXPERTS,
    "gemma2": WINDOW | {"query_pre_attn_scalar": 8, "final_logit_softcapping": 30.0},
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": 8},
    "gemma3": {"text_config": BASE | WINDOW | {"query_pre_attn_scalar": 8}, "vision_config": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4},
    "granite": {"logits_scaling": 8.0},
    "llama4_text": EXPERTS | {"intermediate_size_mlp": 48, "attention_chunk_size": 6},
    "qwen3_5_text": LINEAR, "olmo_hybrid": LINEAR | HYBRID | {"num_key_value_heads": 4},
    "qwen3_next": LINEAR | HYBRID | EXPERTS | {"shared_expert_intermediate_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "granitemoehybrid": MAMBA | EXPERTS | {"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 16},
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "jamba": MIXED | {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": MIXED | {"n_mamba_heads": 2, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": MIXED | {"mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1, "adapter_rank": 4, "num_key_value_heads": 4},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mamba", "mlp"], "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "mamba": {"state_size": 8}, "falcon_mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "recurrent_gemma": {"attention_window_size": 6, "lru_width": 32, "block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 32},
    "minimax": EXPERTS | HYBRID | {"block_size": 4},
    "bloom": {}, "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512},
}  # fmt: skip
ONE_OF_A_KIND = {"llama", "gemma3", "gpt_oss", "qwen3_5_text", "lfm2", "jamba", "mamba2", "rwkv",
                 "minimax", "bloom"}  # fmt: skip
"""A family for each kind of cache; `make test-all` takes all of them."""
OWN_NAMES = ("gpt2", "bloom", "gemma3")
"""Families whose configs have names of their own."""
PROMPTS = ([b"Who is it?", b" and then?", b" <information>It is a longer text.</information> so"],
           [b"A"], [b"Where is Oslo, the city?", b"?"])  # fmt: skip


of_every_family = pytest.mark.parametrize(
    "family",
    [pytest.param(x, marks=() if x in ONE_OF_A_KIND else pytest.mark.slow) for x in FAMILIES],
)


def tiny_model(family: str) -> Any:
    """Return a random float32 model of a family."""
    base = {"eos_token_id": EOS} | ({} if family == "gemma3" else {"vocab_size": VOCABULARY})
    base = base if family in OWN_NAMES else BASE
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**base, **FAMILIES[family]})
    return AutoModelForCausalLM.from_config(config).float().eval()


def judged(model: Any) -> TransformersEngine:
    """Return an engine with `model`, as `start` leaves it."""
    engine = TransformersEngine("", "cpu", "float32")
    engine.model, engine.tokenizer = model, Latin()
    name = type(model).__name__
    tolerance = engine._context.judge(model, engine.tokenizer, name)
    engine._together.judge(model, engine.tokenizer, name, tolerance)
    return engine


@of_every_family
def test_sampled_log_probs_are_the_model_s_alone(family: str) -> None:
    """Of dialogues of several turns and lengths, for each family and kind of cache."""
    model = tiny_model(family)
    engine = judged(model)
    for texts in PROMPTS:
        context: list[int] = []
        for seed, text in enumerate(texts):
            context += text
            got = asyncio.run(engine.generate(context, Sampling(5, seed=seed)))
            assert got.log_probs == pytest.approx(own_log_probs(model, context, got), abs=1e-4)
            context += got.ids


@pytest.mark.parametrize(
    ("family", "expected"),
    [("llama", Reuse.ANY), ("gemma3_text", Reuse.ANY), ("qwen3_5_text", Reuse.ANY),
     ("lfm2", Reuse.ANY), ("jamba", Reuse.STEP), ("minimax", Reuse.NONE)],
)  # fmt: skip
def test_a_cache_is_used_for_what_it_can_do(family: str, expected: Reuse) -> None:
    """Families that people train keep the whole cache; one that it does not fit uses none."""
    assert judged(tiny_model(family))._context.reuse is expected


def test_a_model_that_reads_ahead_is_refused() -> None:
    """A token's log-prob that depends on the text after it is no policy."""
    config = BertConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48,
                        num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3)  # fmt: skip
    model = BertLMHeadModel(config).eval()
    with pytest.raises(ModelError):
        ContextCache().judge(model, ByteTokenizer(), "bert")
