"""Merges a LoRA adapter into its base model, in one folder that any engine can read.

The sum is computed in float32, then rounded to the engine's dtype, as exports of training runs do.
"""

from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from transformers import PretrainedConfig

from search_r1.inference.adapter_folder import base_model_of
from verl.agent.settings import copy_settings
from verl.model_files import (
    ModelProblem,
    check_finite,
    model_errors,
    quiet_transformers,
    summarise,
)
from verl.plugins import imported
from verl.quantization import check_unquantized
from verl.training.loading import load_causal_lm
from verl.training.weights import copy_tokenizer


def merge(base: Path, adapter: Path, out: Path, dtype: str) -> Path:
    """Merge the adapter into the base model, write the result in `dtype` to `out`; return `out`.

    `search_r1.json` is copied from the adapter, or else from the base. Raises ModelError if the
    folder has no adapter, or an adapter of another model (`check_base`).
    """
    subject, expected = f"--adapter {adapter}", f"an adapter that fits {base}"
    named = base_model_of(adapter)
    fix = f"give --model the model that it was trained on: {named or 'not recorded'}"
    # The sum of a quantized model and an adapter is not what the adapter was trained with.
    check_unquantized("--model", str(base), PretrainedConfig.get_config_dict(base)[0])
    imported("verl.ext.lora.base:check_base")(subject, adapter, base, named)
    lm = load_causal_lm(str(base), attention=None)
    with model_errors(str(base), "", subject, expected, fix), quiet_transformers():
        settings = PeftConfig.from_pretrained(str(adapter))
        settings.inference_mode = True
        adapted: Any = PeftModel(lm, settings)
        loaded = adapted.load_adapter(str(adapter), "default")
        for kind in ("missing_keys", "unexpected_keys"):
            keys = getattr(loaded, kind)
            if keys:  # peft only warns, and keeps random numbers in place of missing tensors
                raise ModelProblem(f"{kind.replace('_', ' ')}: {summarise(keys)}")
        merged = adapted.merge_and_unload()
    check_finite(merged.named_parameters(), f"{subject} over {base}")
    merged.to(getattr(torch, dtype)).save_pretrained(out)
    copy_tokenizer(str(base), out)
    if not copy_settings(adapter, out):
        copy_settings(base, out)
    return out
