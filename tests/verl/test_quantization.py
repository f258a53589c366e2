"""A quantized model is refused where it would be trained, in one line, before anything is loaded."""

# ruff: noqa: E501 - a table reads best with a case a line
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tests.bad_models import entry, whole_model
from verl.errors import ModelError
from verl.model_files import check_model, check_weights, read_config
from verl.quantization import CONFIGS, check_unquantized, quantization_of

DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "fbgemm_fp8": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": []},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "torchao": {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}},
    "quanto": {"quant_method": "quanto", "weights": "int8"},
    "hqq": {"quant_method": "hqq", "quant_config": {}},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "exl2": {"quant_method": "exl2", "bits": 4.0},
}  # fmt: skip


@pytest.mark.parametrize("method", DESCRIPTIONS)
@pytest.mark.parametrize("parts", [(), ("text_config",), ("thinker_config", "text_config")])
def test_each_method_is_found_in_any_part(method: str, parts: tuple[str, ...]) -> None:
    """At the top of config.json, or in the text model of a composite one."""
    config: dict[str, Any] = {"quantization_config": DESCRIPTIONS[method]}
    for part in reversed(parts):
        config = {"model_type": "x", part: config}
    assert quantization_of(config) == method
    with pytest.raises(ModelError, match=method):
        check_unquantized("actor_rollout_ref.model.path", "nobody/model", config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"text_config": {"quantization_config": None}, "rope_parameters": {"factor": 2}}, None),
        ({"quantization_config": {}}, "an unnamed method"),
        ({"quantization_config": {"load_in_8bit": True}}, "bitsandbytes"),
        ({"compression_config": {"format": "int-quantized"}}, "int-quantized"),
        ({"quantization": {"group_size": 64, "bits": 4, "mode": "affine"}}, "affine"),
    ],
)
def test_what_counts_as_quantized(config: dict[str, Any], expected: str | None) -> None:
    """Null is fine; an older name, an empty description and MLX's entry are not."""
    assert quantization_of(config) == expected


def test_a_quantized_folder_is_refused_only_for_training(tmp_path: Path) -> None:
    """Where the model only samples, its engine may be able to load it."""
    folder = whole_model(tmp_path)
    entry("config.json", "quantization_config", None)(folder)
    check_model("model_path", str(folder))
    entry("config.json", "quantization_config", DESCRIPTIONS["mxfp4"])(folder)
    with pytest.raises(ModelError) as caught:
        check_model("model_path", str(folder))
    message = str(caught.value)
    assert message.startswith(f"model_path: got {folder}, whose weights are quantized (mxfp4)")
    assert "Mxfp4Config(dequantize=True)" in message and "\n" not in message
    check_model("--model", str(folder), may_be_quantized=True)


def as_mxfp4(tensors: dict[str, Tensor]) -> None:
    """Replace the experts' weights by random blocks of 32 values with a scale each."""
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, width, height = tensors.pop(name).shape
        shape = num_experts, height, width // 32
        tensors[f"{name}_blocks"] = torch.randint(0, 255, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.full(shape, 120, dtype=torch.uint8)


def as_fp8(tensors: dict[str, Tensor]) -> None:
    """Replace the projections' weights by float8 values with a scale for each block of 32 x 32."""
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        scales = torch.full([size // 32 for size in tensors[name].shape], 0.1)
        tensors[name] = (tensors[name] * 10).to(torch.float8_e4m3fn)
        tensors[name.replace("weight", "weight_scale_inv")] = scales


@pytest.mark.parametrize(
    ("method", "family", "change"), [("mxfp4", "gpt_oss", as_mxfp4), ("fp8", "llama", as_fp8)]
)
def test_the_advice_writes_a_copy_that_loads(
    tmp_path: Path, method: str, family: str, change: Callable[[dict[str, Tensor]], None]
) -> None:
    """The call in the message gives an unquantized model with all of its weights."""
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    description = {"quant_method": method, "weight_block_size": [32, 32]}
    entry("config.json", "quantization_config", description)(tmp_path)
    raw_config, _ = PretrainedConfig.get_config_dict(tmp_path)
    with pytest.raises(ModelError) as caught:
        check_unquantized("x", str(tmp_path), raw_config)
    call = str(caught.value).partition("beside it: ")[2]
    names = {name: getattr(transformers, name) for name in CONFIGS.values()}
    exec(
        call.replace("COPY", f"{tmp_path}/copy"),
        {"AutoModelForCausalLM": AutoModelForCausalLM, **names},
    )
    config = read_config(f"{tmp_path}/copy")
    assert quantization_of(config.to_dict()) is None
    check_weights(f"{tmp_path}/copy", config, needs_head=True, by_transformers=True)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("hf_quant_config.json", {"producer": {}, "quantization": {"quant_algo": "FP8"}}, "FP8"),
        ("quantize_config.json", {"bits": 4, "quant_method": "gptq"}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "version": "GEMM"}, "an unnamed method"),
    ],
)
def test_a_file_beside_the_config_counts(
    tmp_path: Path, name: str, content: dict[str, Any], expected: str
) -> None:
    """Older tools describe quantization only there."""
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=expected):
        check_unquantized("x", str(tmp_path), PretrainedConfig().to_dict())


def test_a_folder_of_gguf_files_is_refused(tmp_path: Path) -> None:
    """They hold quantized weights, whatever config.json says."""
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="gguf"):
        check_unquantized("x", str(tmp_path), {})
