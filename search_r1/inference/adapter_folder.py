"""The folder of a LoRA adapter as peft writes it: its settings, without loading weights."""

from pathlib import Path
from typing import Any

from verl.errors import ModelError, explain
from verl.json_files import read_object

CONFIG_FILE = "adapter_config.json"
"""File that identifies a peft adapter folder."""


def base_model_of(adapter: Path) -> str:
    """Return the base model that an adapter's config names, or '' if it names none."""
    return str(adapter_settings(adapter).get("base_model_name_or_path") or "")


def adapter_settings(adapter: Path) -> dict[str, Any]:
    """Return the settings of an adapter that peft wrote. Raises ModelError for another folder."""
    file = adapter / CONFIG_FILE
    if not file.is_file():
        got = f"a folder without {CONFIG_FILE}" if adapter.is_dir() else "no such folder"
        fix = "give the folder adapter/ that training or `verl.checkpoint export --adapter` wrote"
        raise ModelError(explain(f"--adapter {adapter}", got, "a LoRA adapter of peft", fix))
    from verl.model_files import model_errors  # noqa: PLC0415 - transformers: seconds

    with model_errors(str(adapter), CONFIG_FILE, "--adapter", "a LoRA adapter of peft"):
        return read_object(file)
