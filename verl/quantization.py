"""Quantized checkpoints: recognised by their files, and refused where a model is trained.

Training needs weights that a gradient can change and ranks can shard. Models that only sample may
be quantized: their engine loads them if it can.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.errors import ModelError, explain

ENTRIES = ("quantization_config", "compression_config", "quantization")
"""Entries of config.json that describe quantized weights; the last is MLX's."""
FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files in which ModelOpt, AutoGPTQ and AutoAWQ describe them, with or without such an entry."""
METHODS = ("quant_method", "quant_algo", "format", "mode")
"""Names of a method in a description, the most common first."""
COPY = (
    'AutoModelForCausalLM.from_pretrained("{path}", dtype="bfloat16", quantization_config='
    '{config}(dequantize=True)).save_pretrained("COPY", save_original_format=False)'
)
"""Writes an unquantized copy, without its tokenizer."""
CONFIGS = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Classes of transformers for the methods of which it writes copies that can be loaded again."""


def quantization_of(config: Mapping[str, Any]) -> str | None:
    """Return the method by which a config.json says that weights are quantized; None if none.

    The entry may stand in the config of a part, such as `text_config`. An entry that is null does
    not count.
    """
    for name in ENTRIES:
        if config.get(name) is not None and config[name] is not False:
            return _method(config[name])
    parts = (part for part in config.values() if isinstance(part, Mapping))
    return next((method for part in parts if (method := quantization_of(part))), None)


def _method(description: Any) -> str:
    """Return the name of the method that an entry or file describes."""
    if not isinstance(description, Mapping):
        return str(description)
    names = [description[name] for name in METHODS if isinstance(description.get(name), str)]
    if not names and description.get("load_in_4bit", description.get("load_in_8bit")) is not None:
        return "bitsandbytes"
    inner = description.get("quantization")
    if not names and isinstance(inner, Mapping):
        return _method(inner)
    return names[0] if names else "an unnamed method"


def check_unquantized(subject: str, path: str, config: Mapping[str, Any]) -> None:
    """Raise ModelError if the model at `path`, whose config.json is `config`, is quantized.

    `path` may be a hub name, of which only the config is known.
    """
    method = quantization_of(config)
    folder = Path(path).expanduser()
    if method is None and folder.is_dir():
        method = _method_of_files(folder)
    if method is None:
        return
    fix = "give the checkpoint that it was made from (base_model of its model card)"
    if method in CONFIGS:
        fix += ", or with transformers write a copy and put the tokenizer's files beside it: "
        fix += COPY.format(path=path, config=CONFIGS[method])
    got = f"{path}, whose weights are quantized ({method})"
    expected = "weights in float32, bfloat16 or float16, which can be trained"
    raise ModelError(explain(subject, got, expected, fix))


def _method_of_files(folder: Path) -> str | None:
    """Return the method that a file beside config.json describes; None without such a file."""
    for file in (folder / name for name in FILES):
        if file.is_file():
            try:
                return _method(json.loads(file.read_text(encoding="utf-8")))
            except ValueError:
                return f"described in {file.name}"
    is_gguf = any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))
    return "gguf" if is_gguf else None
