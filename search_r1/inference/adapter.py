"""A LoRA adapter over a model: whose it is, and both merged into one folder that any engine reads.

The sum is made in float32 and then rounded to the engine's dtype, as an export of training does.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from search_r1.inference.options import SETTINGS_FILE
from verl.errors import ModelError, explain
from verl.training.weights import copy_tokenizer

CONFIG_FILE = "adapter_config.json"
"""What makes a folder peft's."""


def base_of(adapter: Path) -> str:
    """The model that an adapter's folder says it was trained on; empty where it says nothing."""
    return str(_settings(adapter).get("base_model_name_or_path") or "")


def merge(base: Path, adapter: Path, out: Path, dtype: str) -> Path:
    """Write the model of `base` with the adapter's share added, in `dtype`; returns `out`.

    `search_r1.json` comes from the adapter, or else from the base. Raises ModelError for a folder
    that holds no adapter, or one of another model.
    """
    _settings(adapter)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        whole = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        fix = f"give --model the model that it was trained on: {base_of(adapter) or 'not recorded'}"
        expected = f"an adapter that fits {base}"
        raise ModelError(explain(f"--adapter {adapter}", reason, expected, fix)) from error
    whole.to(getattr(torch, dtype)).save_pretrained(out)
    copy_tokenizer(str(base), out)
    written = [folder / SETTINGS_FILE for folder in (adapter, base)]
    for file in [file for file in written if file.is_file()][:1]:
        shutil.copy(file, out / SETTINGS_FILE)
    return out


def _settings(adapter: Path) -> dict[str, Any]:
    """peft's own settings of the folder; raises ModelError where there are none."""
    file = adapter / CONFIG_FILE
    if not file.is_file():
        got = f"a folder without {CONFIG_FILE}" if adapter.is_dir() else "no such folder"
        fix = "give the folder adapter/ that training or `verl.checkpoint export --adapter` wrote"
        raise ModelError(explain(f"--adapter {adapter}", got, "a LoRA adapter of peft", fix))
    return dict(json.loads(file.read_text(encoding="utf-8")))
