"""Model sizes are compared with the models that transformers builds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import inject_adapter_in_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
)

from tests.verl.ext.memory.shapes import FACTS, shape_of
from verl.config import AdapterConfig
from verl.ext.lora.model import peft_config
from verl.ext.model_shape import ModelShape, read_shape

SMALL: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 96, "intermediate_size": 250, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS = {
    "smollm2": LlamaConfig(**SMOLLM2),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama with biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "wide heads": LlamaConfig(**SMALL, head_dim=32),
    "mistral": MistralConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True),
    **{name: Qwen2Config(**facts) for name, facts in FACTS.items()},
}


def on_meta(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_is_counted(name: str) -> None:
    """The tensor sizes equal those of the model on the meta device."""
    shape = ModelShape.of(CONFIGS[name])
    numels = sorted(p.numel() for p in on_meta(CONFIGS[name]).parameters())
    assert sorted(shape.tensors()) == numels
    assert shape.layers * shape.block_parameters + shape.root() == shape.parameters()


def test_the_shape_of_a_published_model() -> None:
    """Qwen2.5-7B, computed by hand: 28 query and 4 key heads of 128, MLPs of 18,944."""
    shape = shape_of("Qwen2.5-7B")
    assert (shape.query_size, shape.kv_heads * shape.head_dim) == (3584, 512)
    assert shape.max_outputs == 18944
    block = 3584 * (2 * 3584 + 2 * 512 + 3 * 18944)
    assert shape.linear_weights == 28 * block
    assert shape.last_linear_weights == 28 * 3584 * 18944


def test_any_architecture_is_counted() -> None:
    """An architecture with other names for its parts is counted too."""
    config = Gemma2Config(**SMALL, head_dim=32)
    shape = ModelShape.of(config)
    assert shape.parameters() == sum(p.numel() for p in on_meta(config).parameters())
    assert (shape.layers, shape.query_size, len(shape.linears)) == (3, 6 * 32, 3 * 7)


def test_unsupported_folders_have_no_shape(tmp_path: Path) -> None:
    """A folder without config.json, an unknown config, a mixture of experts."""
    assert read_shape(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{}")
    assert read_shape(str(tmp_path)) is None
    Qwen2MoeConfig(**SMALL, num_experts=4).save_pretrained(tmp_path)
    assert read_shape(str(tmp_path)) is None
    Qwen2Config(**SMALL).save_pretrained(tmp_path)
    assert read_shape(str(tmp_path)) == ModelShape.of(Qwen2Config(**SMALL))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_adapter_size_equals_that_of_peft(targets: Any) -> None:
    """LoRA on all linear layers, or on some."""
    lm = on_meta(CONFIGS["llama"])
    options = AdapterConfig(lora_rank=8, target_modules=targets)
    inject_adapter_in_model(peft_config(lm, options), lm)
    added = sum(p.numel() for name, p in lm.named_parameters() if ".lora_" in name)
    shape = ModelShape.of(CONFIGS["llama"])
    assert shape.adapter(8, targets) == added


def test_the_critic_has_no_output_head() -> None:
    """A critic lacks an untied head; a tied one is part of the embedding."""
    untied, tied = shape_of("Qwen2.5-7B"), shape_of("Qwen2.5-3B")
    assert untied.parameters() - untied.parameters(with_head=False) == 152064 * 3584
    assert tied.parameters(with_head=False) == tied.parameters()
