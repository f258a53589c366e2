"""Adapters outside of a model: peft's folder, merging into weights, and whose base they need."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor

from verl.errors import ConfigError, explain
from verl.files import whole_file

PREFIX = "base_model.model."
"""What peft and vLLM expect before the module's path in a folder's tensor names."""
PROBE_BYTES = 1 << 20


@dataclass(frozen=True)
class Adapter:
    """A trained adapter: its options and whole tensors."""

    config: LoraConfig
    tensors: Mapping[str, Tensor]
    """`<module>.lora_A.weight` (rank, in) and `<module>.lora_B.weight` (out, rank), any device."""

    @classmethod
    def of_parameters(
        cls, config: LoraConfig, parameters: Mapping[str, Tensor], name: str
    ) -> Adapter:
        """From parameters as peft names them in a model: `lm.<module>.lora_A.<name>.weight`."""
        return cls(config, {
            key.removeprefix("lm.").replace(f".{name}.weight", ".weight"): tensor
            for key, tensor in parameters.items() if ".lora_" in key
        })  # fmt: skip

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.config.lora_alpha / self.config.r

    def delta(self, name: str) -> Tensor | None:
        """What the adapter adds to the weight `<module>.weight`, float32; None for nothing."""
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" not in self.tensors:
            return None
        a, b = (self.tensors[f"{module}.lora_{side}.weight"].float() for side in "AB")
        return self.scale * (b @ a)

    def merge(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The base's weights with the adapter's share added, in float32 where there is one."""
        for name, weight in named:
            delta = self.delta(name)
            yield name, weight if delta is None else weight.float() + delta.to(weight.device)

    def write(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """Write peft's folder; each file appears whole or not at all."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            PREFIX + name: tensor.detach().to("cpu", dtype).contiguous()
            for name, tensor in self.tensors.items()
        }
        with whole_file(directory / "adapter_model.safetensors") as part:
            save_file(tensors, part, metadata={"format": "pt"})
        config = copy.copy(self.config)
        config.inference_mode = True
        config.target_modules = sorted(config.target_modules or ())  # a set has no order of its own
        config.save_pretrained(str(directory))

    def record(self) -> dict[str, Any]:
        """JSON for a checkpoint: the options, and which base they belong to."""
        base = str(self.config.base_model_name_or_path)
        return {
            "base": base,
            "fingerprint": fingerprint(base),
            "lora_rank": self.config.r,
            "lora_alpha": float(self.config.lora_alpha),
            "target_modules": sorted(self.config.target_modules or ()),
        }


def config_of(record: Mapping[str, Any]) -> LoraConfig:
    """peft's form of the options that a checkpoint's record holds."""
    return LoraConfig(
        r=record["lora_rank"],
        lora_alpha=record["lora_alpha"],
        target_modules=list(record["target_modules"]),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=record["base"],
    )


def fingerprint(base: str) -> str:
    """A short hash of the weights of a model folder: sizes, and both ends of each file.

    A name of the hub has no files here and is its own fingerprint.
    """
    digest = hashlib.sha256()
    files = sorted(Path(base).expanduser().glob("*.safetensors"))
    if not files:
        return base
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(PROBE_BYTES))
            file.seek(max(0, size - PROBE_BYTES))
            digest.update(file.read(PROBE_BYTES))
    return digest.hexdigest()[:16]


def check_base(record: Mapping[str, Any], base: str) -> None:
    """Refuse a base other than the one an adapter was trained on. Raises ConfigError."""
    found = fingerprint(base)
    if found != record["fingerprint"]:
        raise ConfigError(
            explain("base of the adapter", f"{base} ({found})",
                    f"the weights of {record['base']} ({record['fingerprint']})",
                    "give the model that the adapter was trained on")
        )  # fmt: skip


def check_same(saved: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse to go on with other adapters, or over another base. Raises ConfigError."""
    for name in sorted({*saved, *present}):
        old, new = saved.get(name) or {"lora_rank": 0}, present.get(name) or {"lora_rank": 0}
        # A base that moved is the same base.
        differing = [key for key in sorted({*old, *new} - {"base"}) if old.get(key) != new.get(key)]
        if differing:
            got = ", ".join(f"{key}={new.get(key)}" for key in differing)
            wanted = ", ".join(f"{key}={old.get(key)}" for key in differing)
            raise ConfigError(
                explain(f"adapter of the {name}", got, f"the checkpoint's {wanted}",
                        "give the checkpoint's options, or trainer.resume_mode=disable")
            )  # fmt: skip
