"""Combining two adapters, and the written folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from example.smollm2.adapters import LIMIT_BYTES, Factors, combine, largest_rank, truncate, write
from example.tiny import tiny_llama
from verl.config import AdapterConfig
from verl.errors import ModelError
from verl.ext.lora.adapter import Adapter
from verl.ext.lora.model import AdaptedModel, Role

DIALOGUE = {"template": "short", "max_turns": 2, "topk": 3}


def trained(base: Path, rank: int, alpha: float, seed: int) -> Adapter:
    """Return an adapter as after training, with random B matrices."""
    torch.manual_seed(seed)
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = AdaptedModel(lm, {Role.ACTOR: AdapterConfig(rank, alpha)})
    parameters = {n: p.detach() for n, p in model.lm.named_parameters() if ".lora_" in n}
    for name, tensor in parameters.items():
        if ".lora_B." in name:
            torch.nn.init.normal_(tensor, std=0.05)
    return Adapter.of_parameters(model.configs[Role.ACTOR], parameters, "actor")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_llama(512).save_pretrained(folder)
    return folder


def weights(base: Path) -> dict[str, Tensor]:
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return {name: p.detach().clone() for name, p in lm.named_parameters()}


def test_the_combination_equals_both_adapters(base: Path, tmp_path: Path) -> None:
    """Merging the combined adapter gives the same weights as merging one after the other."""
    first, second = trained(base, 3, 6, seed=1), trained(base, 2, 8, seed=2)
    expected = dict(second.merge(first.merge(weights(base).items())))
    for name, adapter in (("first", first), ("second", second)):
        adapter.write(tmp_path / name)
    both = combine(Factors.read(tmp_path / "first"), Factors.read(tmp_path / "second"))
    assert both.rank == 5
    write(both, tmp_path / "both", str(base), DIALOGUE, torch.float32)
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(lm, tmp_path / "both").merge_and_unload()
    changed = 0
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weight.detach(), expected[name], rtol=1e-5, atol=1e-6)
        changed += int(not torch.equal(weight.detach(), weights(base)[name]))
    assert changed == 14  # seven layers in each of two blocks


def test_the_folder_has_dialogue_settings_and_base(base: Path, tmp_path: Path) -> None:
    """The folder has search_r1.json and the name of the base."""
    trained(base, 2, 4, seed=4).write(tmp_path / "trained")
    write(Factors.read(tmp_path / "trained"), tmp_path / "out", "models/m", DIALOGUE, torch.float32)
    assert json.loads((tmp_path / "out" / "search_r1.json").read_text()) == DIALOGUE
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "models/m"
    assert (config["r"], config["lora_alpha"]) == (2, 2)


def test_adapters_of_different_modules_are_refused() -> None:
    """The error names a module that one of the adapters lacks."""
    a, b = torch.ones(1, 2), torch.ones(3, 1)
    first = Factors(1, 1.0, {"q.lora_A.weight": a, "q.lora_B.weight": b})
    second = Factors(1, 1.0, {"v.lora_A.weight": a, "v.lora_B.weight": b})
    with pytest.raises(ModelError, match="q in one only"):
        combine(first, second)


def test_an_adapter_above_the_size_limit_is_refused(tmp_path: Path) -> None:
    """An adapter above 12 MB is an error before anything is written."""
    a, b = torch.ones(1, LIMIT_BYTES // 2), torch.ones(1, 1)
    large = Factors(1, 1.0, {"q.lora_A.weight": a, "q.lora_B.weight": b})
    with pytest.raises(ModelError, match="sft_rank"):
        write(large, tmp_path / "out", "base", DIALOGUE, torch.bfloat16)
    assert not (tmp_path / "out").exists()


def test_a_truncated_adapter_is_the_best_of_its_rank() -> None:
    """Its product is that of the SVD of the full product; a higher rank changes nothing."""
    torch.manual_seed(5)
    a, b = torch.randn(5, 12, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    adapter = Factors(5, 2.0, {"q.lora_A.weight": a, "q.lora_B.weight": b})
    small = truncate(adapter, 3)
    u, values, v = torch.linalg.svd(2 * b @ a)
    assert (small.rank, small.scale) == (3, 1.0)
    product = small.tensors["q.lora_B.weight"] @ small.tensors["q.lora_A.weight"]
    torch.testing.assert_close(product, u[:, :3] * values[:3] @ v[:3])
    assert truncate(adapter, 5) is adapter
    assert largest_rank(adapter, torch.bfloat16) == LIMIT_BYTES // (2 * (12 + 9))
