"""Prints docs/families.md: which model families can be trained, tried with transformers' defaults.

`python -m scripts.family_page > docs/families.md`; half a minute.
"""

import sys
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from verl.errors import ModelError
from verl.training.family import build_trial, check_family, layer_kinds

HEAD = """# Model families

Printed by `python -m scripts.family_page`. For each family, a small model with random weights and
a few layers of each kind is computed as a run computes it: several sequences in one row, without
and with a prompt that they share. A family is *right* if its log-probs are within 0.001 nats (in
float32) of the model's own forward pass on each sequence alone.

Before each run, and before supervised fine-tuning, the same is done with the config of the model
that will be trained: about a second. A model that differs, or that cannot be tried, is refused in
one line. So a family that is not in the table may well work. Families are those of transformers'
`model_type`.

- **Layers with a state** (convolutions, recurrences, linear attention) run sequence by sequence,
  each response behind its prompt; everything else is computed in one row. They cannot be divided
  over ranks (`ulysses_sequence_parallel_size=1`).
- **Soft caps and attention sinks** are computed without a fused kernel, run by run.
- **What follows the head** (caps, scaling) is computed by the model's own forward pass.
- **Mixtures of experts** are right here, but their memory is not estimated, and LoRA adapts
  linear layers only.
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


def verdict(family: str) -> tuple[str, str]:
    """Return "right" or "refused", and the layers through which tokens see each other."""
    config = family_config(family)
    try:
        check_family(config, family)
    except ModelError:
        return "refused", ""
    return "right", ", ".join(sorted(layer_kinds(build_trial(config))))


def page() -> str:
    rows = "".join("| `{}` | {} | {} |\n".format(name, *verdict(name)) for name in FAMILIES)
    return f"{HEAD}| family | packed forward pass | layers |\n| --- | --- | --- |\n{rows}"


if __name__ == "__main__":
    sys.stdout.write(page())
