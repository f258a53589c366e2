"""Two adapters as one, and what is written of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from example.smollm2.adapters import LIMIT_BYTES, Factors, combine, write
from example.tiny import tiny_llama
from verl.config import AdapterConfig
from verl.errors import ModelError
from verl.training.lora import AdaptedModel, Adapter, Role

DIALOGUE = {"template": "short", "max_turns": 2, "topk": 3}


def trained(base: Path, rank: int, alpha: float, seed: int) -> Adapter:
    """An adapter as training writes it, with B as if it had learned."""
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


def test_one_adapter_is_both_above_each_other(base: Path, tmp_path: Path) -> None:
    """peft merges the combination to the weights that merging one after the other gives."""
    first, second = trained(base, 3, 6, seed=1), trained(base, 2, 8, seed=2)
    wanted = dict(second.merge(first.merge(weights(base).items())))
    for name, adapter in (("first", first), ("second", second)):
        adapter.write(tmp_path / name)
    both = combine(Factors.read(tmp_path / "first"), Factors.read(tmp_path / "second"))
    assert both.rank == 5
    write(both, tmp_path / "both", str(base), DIALOGUE, torch.float32)
    lm = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    found = PeftModel.from_pretrained(lm, tmp_path / "both").merge_and_unload()
    changed = 0
    for name, weight in found.named_parameters():
        torch.testing.assert_close(weight.detach(), wanted[name], rtol=1e-5, atol=1e-6)
        changed += int(not torch.equal(weight.detach(), weights(base)[name]))
    assert changed == 14  # seven layers in each of two blocks


def test_bfloat16_halves_the_file_and_keeps_the_adapter(base: Path, tmp_path: Path) -> None:
    """The shipped file has two bytes a number, and adds what the trained one did, to 1 %."""
    trained(base, 4, 8, seed=3).write(tmp_path / "whole")
    whole = Factors.read(tmp_path / "whole")
    write(whole, tmp_path / "shipped", "models/base", DIALOGUE, torch.bfloat16)
    shipped = Factors.read(tmp_path / "shipped")
    numbers = sum(tensor.numel() for tensor in whole.tensors.values())
    size = (tmp_path / "shipped" / "adapter_model.safetensors").stat().st_size
    assert 2 * numbers < size < 2 * numbers + 10_000
    for module in whole.modules:
        one, two = (
            f.scale * f.tensors[f"{module}.lora_B.weight"] @ f.tensors[f"{module}.lora_A.weight"]
            for f in (whole, shipped)
        )
        assert (one - two).norm() < 0.01 * one.norm()


def test_the_folder_says_how_to_talk_and_to_which_base(base: Path, tmp_path: Path) -> None:
    """search_r1.json and the base's name lie beside the weights."""
    trained(base, 2, 4, seed=4).write(tmp_path / "whole")
    write(Factors.read(tmp_path / "whole"), tmp_path / "out", "models/m", DIALOGUE, torch.float32)
    assert json.loads((tmp_path / "out" / "search_r1.json").read_text()) == DIALOGUE
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "models/m"
    assert (config["r"], config["lora_alpha"]) == (2, 2)


def test_adapters_of_different_modules_are_refused() -> None:
    """A module that one of them lacks is named."""
    a, b = torch.ones(1, 2), torch.ones(3, 1)
    one = Factors(1, 1.0, {"q.lora_A.weight": a, "q.lora_B.weight": b})
    two = Factors(1, 1.0, {"v.lora_A.weight": a, "v.lora_B.weight": b})
    with pytest.raises(ModelError, match="q in one only"):
        combine(one, two)


def test_what_is_too_large_to_ship_is_refused(tmp_path: Path) -> None:
    """More than 12 MB is an error that names the ranks, before anything is written."""
    a, b = torch.ones(1, LIMIT_BYTES // 2), torch.ones(1, 1)
    large = Factors(1, 1.0, {"q.lora_A.weight": a, "q.lora_B.weight": b})
    with pytest.raises(ModelError, match="sft_rank"):
        write(large, tmp_path / "out", "base", DIALOGUE, torch.bfloat16)
    assert not (tmp_path / "out").exists()
