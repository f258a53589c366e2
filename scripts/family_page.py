"""Prints the families in docs/guides/models.md, tried with transformers' defaults.

`python -m scripts.family_page`; half a minute.
"""

import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from verl.errors import ModelError
from verl.training.family import check_family

HEAD = """## Families

A family is *right* if a small model of it with random weights, computed as a run computes it, has
log-probs within 0.001 nats (in float32) of the model's own forward pass. Before each run the same
is done with the config of the model that will be trained; a model that differs is refused. So a
family that is not listed may well work. Names are those of transformers' `model_type`; vision
models are not supported; `python -m scripts.family_page` prints this section.

- **Layers with a state** (convolutions, recurrences, linear attention) run sequence by sequence,
  each response behind its prompt. They need `ulysses_sequence_parallel_size=1`.
- **Soft caps and attention sinks** are computed without a fused kernel, run by run.
- **Mixtures of experts** are right, but their memory is not estimated, and LoRA adapts linear
  layers only.
- Dropout and the noise of routers are switched off in training, since there is none in sampling.

"""
FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text", "qwen3_next", "qwen2_moe", "qwen3_moe",
    "mistral", "ministral3", "mixtral", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4_text",
    "phi", "phi3", "smollm3", "olmo2", "olmo3", "granite", "granitemoehybrid", "gpt_oss", "lfm2",
    "glm4", "glm4_moe", "cohere", "cohere2", "deepseek_v3", "ernie4_5", "exaone4", "seed_oss",
    "starcoder2", "minicpm3", "minimax", "falcon_h1", "nemotron_h", "bamba", "jamba", "mamba2",
    "recurrent_gemma", "gpt2", "opt", "gpt_neox", "biogpt", "falcon", "bloom", "mpt", "gpt_neo",
    "gptj", "rwkv", "stablelm", "llama4_text", "modernbert-decoder",
)  # fmt: skip


MAMBA = {"layer_types": ["mamba", "attention"] * 2, "num_hidden_layers": 4}
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    "granitemoehybrid": {**MAMBA, "logits_scaling": 8.0, "position_embedding_type": "rope"},
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "falcon_h1": {"lm_head_multiplier": 0.04, "embedding_multiplier": 5.6},
    "falcon": {"alibi": True},
}
"""Values of published models that transformers' defaults do not have."""


def family_config(family: str) -> PretrainedConfig:
    """Return transformers' default config of a family, with the values of published models."""
    config: PretrainedConfig = AutoConfig.for_model(family, **PUBLISHED.get(family, {}))
    return config


def is_right(family: str) -> bool:
    """Return whether the packed forward pass of a family is the model's own."""
    try:
        check_family(family_config(family), family)
    except ModelError:
        return False
    return True


def page() -> str:
    """Return the section: rules, the right families, the refused ones."""
    right = [name for name in FAMILIES if is_right(name)]
    refused = [name for name in FAMILIES if name not in right]
    lists = (listed("Right", right), listed("Refused", refused))
    return HEAD + "\n\n".join(lists) + "\n"


def listed(title: str, names: list[str]) -> str:
    """Return names as a paragraph."""
    text = f"{title}: {', '.join(f'`{name}`' for name in names)}."
    return textwrap.fill(text, 100, break_on_hyphens=False)


if __name__ == "__main__":
    sys.stdout.write(page())
