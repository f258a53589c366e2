"""A LoRA adapter over a model: whose it is, and both merged into one folder that any engine reads.

The sum is made in float32 and then rounded to the engine's dtype, as an export of training does.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel

from search_r1.inference.options import SETTINGS_FILE
from verl.errors import ModelError, explain
from verl.model_files import Unfit, few, model_errors, quiet, refuse_values
from verl.training.models import load_causal_lm
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
    subject = f"--adapter {adapter}"
    fix = f"give --model the model that it was trained on: {base_of(adapter) or 'not recorded'}"
    lm = load_causal_lm(str(base), attention=None)
    with model_errors(str(base), "", subject, f"an adapter that fits {base}", fix), quiet():
        settings = PeftConfig.from_pretrained(str(adapter))
        settings.inference_mode = True
        adapted: Any = PeftModel(lm, settings)
        found = adapted.load_adapter(str(adapter), "default")
        for what in ("missing_keys", "unexpected_keys"):
            if getattr(found, what):  # peft only warns, and goes on with random numbers
                raise Unfit(f"{what.replace('_', ' ')}: {few(getattr(found, what))}")
        whole = adapted.merge_and_unload()
    refuse_values(whole.named_parameters(), f"{subject} over {base}")
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
    with model_errors(str(adapter), CONFIG_FILE, "--adapter", "a LoRA adapter of peft"):
        return dict(json.loads(file.read_text(encoding="utf-8")))
