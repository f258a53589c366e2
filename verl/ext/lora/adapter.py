"""A trained adapter outside of a model: its tensors, its record in a checkpoint, its folder."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor

from verl.errors import ConfigError, explain
from verl.model_files import weights_fingerprint
from verl.training.weights import write_file

PREFIX = "base_model.model."
"""Prefix of the tensor names in an adapter's folder, as peft and vLLM expect it."""


@dataclass(frozen=True)
class Adapter:
    """A trained adapter: its options and whole tensors."""

    config: LoraConfig
    tensors: Mapping[str, Tensor]
    """`<module>.lora_A.weight` (rank, in) and `<module>.lora_B.weight` (out, rank), any device."""

    @classmethod
    def of_parameters(cls, config: LoraConfig, parameters: Mapping[str, Tensor], name: str) -> Self:
        """Build it from a model's parameters, named `lm.<module>.lora_A.<name>.weight` by peft."""
        return cls(config, {
            key.removeprefix("lm.").replace(f".{name}.weight", ".weight"): tensor
            for key, tensor in parameters.items() if ".lora_" in key
        })  # fmt: skip

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read a peft folder. Raises ConfigError if it is none."""
        file = directory / "adapter_model.safetensors"
        if not file.is_file() or not (directory / "adapter_config.json").is_file():
            expected = f"a folder with {file.name} and adapter_config.json"
            raise ConfigError(explain("adapter", directory, expected, "name one that has them"))
        tensors = {name.removeprefix(PREFIX): t for name, t in load_file(file).items()}
        return cls(LoraConfig.from_pretrained(str(directory)), tensors)

    @property
    def scale(self) -> float:
        """The factor of the product B A."""
        return self.config.lora_alpha / self.config.r

    def delta(self, name: str) -> Tensor | None:
        """Return what the adapter adds to the weight `name`, float32; None if nothing."""
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in self.tensors:
            return None
        a, b = (self.tensors[f"{module}.lora_{side}.weight"].float() for side in "AB")
        return self.scale * (b @ a)

    def merge(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the base's weights with the adapter merged; merged weights are float32."""
        for name, weight in named:
            delta = self.delta(name)
            yield name, weight if delta is None else weight.float() + delta.to(weight.device)

    def write(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the adapter as a peft folder; its weight file appears whole or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            PREFIX + name: tensor.detach().to("cpu", dtype).contiguous()
            for name, tensor in self.tensors.items()
        }
        write_file(directory / "adapter_model.safetensors", tensors)
        config = copy.copy(self.config)
        config.inference_mode = True
        config.target_modules = sorted(config.target_modules or ())  # a set's order varies
        config.save_pretrained(str(directory))


def record_of_peft_config(config: LoraConfig) -> dict[str, Any]:
    """Return a checkpoint's JSON record of an adapter: its options and its base."""
    base = str(config.base_model_name_or_path)
    return {
        "base": base,
        "fingerprint": weights_fingerprint(base),
        "lora_rank": config.r,
        "lora_alpha": float(config.lora_alpha),
        "target_modules": sorted(config.target_modules or ()),
    }


def peft_config_of_record(record: Mapping[str, Any]) -> LoraConfig:
    """Build peft's config from a checkpoint's record of an adapter."""
    return LoraConfig(
        r=record["lora_rank"], lora_alpha=record["lora_alpha"], lora_dropout=0.0, bias="none",
        target_modules=list(record["target_modules"]), task_type="CAUSAL_LM",
        base_model_name_or_path=record["base"],
    )  # fmt: skip


def check_base(record: Mapping[str, Any], base: str) -> None:
    """Raise ConfigError unless `base` is the base that an adapter was trained on."""
    actual = weights_fingerprint(base, record["fingerprint"])
    if actual != record["fingerprint"]:
        expected = f"the weights of {record['base']} ({record['fingerprint']})"
        fix = "give the model that the adapter was trained on"
        raise ConfigError(explain("base of the adapter", f"{base} ({actual})", expected, fix))


def adapter_of_record(
    record: Mapping[str, Any], base: str | None, parameters: Mapping[str, Tensor]
) -> Adapter:
    """Build the policy's adapter from a checkpoint's record and parameters.

    `base` is its base model's current path, if that has moved. Raises ConfigError for another one.
    """
    path = base or record["base"]
    check_base(record, path)
    return Adapter.of_parameters(
        peft_config_of_record({**record, "base": path}), parameters, "actor"
    )
