"""Combines two LoRA adapters, the second trained on top of the first, into one for the first base.

With scales s and matrices A, B: s1 B1 A1 + s2 B2 A2 = [s1 B1 | s2 B2] [A1 over A2]. The ranks add
up and the result is exact; the scales are multiplied into B, so the new adapter's scale is 1.
What is larger than the limit is cut to the best approximation of the rank that fits (by SVD).
`python -m example.smollm2.adapters --out OUT --base BASE` writes the adapters of a run in bfloat16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from verl.agent.settings import SETTINGS_FILE
from verl.errors import ModelError, explain
from verl.ext.lora.adapter import PREFIX, Adapter, peft_config_of_record

WEIGHTS = "adapter_model.safetensors"
LIMIT_BYTES = 12_000_000
"""Maximum size of an adapter in the repository."""

NUMBERS = (
    "max_turns", "topk", "max_start_length", "max_prompt_length", "max_response_length",
    "max_obs_length",
)  # fmt: skip
"""Numbers of the dialogue's settings."""


@dataclass(frozen=True)
class Factors:
    """An adapter: A (rank, in) and B (out, rank) of each module, with peft's tensor names."""

    rank: int
    scale: float
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> Factors:
        """Read a peft folder. Raises ModelError if there is none."""
        if not (folder / WEIGHTS).is_file():
            fix = "let the stage that trains it run first"
            raise ModelError(explain(f"adapter {folder}", "no such adapter", WEIGHTS, fix))
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = {name: t.float() for name, t in load_file(folder / WEIGHTS).items()}
        return cls(config["r"], config["lora_alpha"] / config["r"], tensors)

    @property
    def modules(self) -> list[str]:
        """Names of the adapted modules in peft, sorted."""
        suffix = ".lora_A.weight"
        return sorted(name.removesuffix(suffix) for name in self.tensors if name.endswith(suffix))

    def scaled(self) -> Factors:
        """Return the same adapter with its scale multiplied into B."""
        tensors = {n: self.scale * t if ".lora_B." in n else t for n, t in self.tensors.items()}
        return Factors(self.rank, 1.0, tensors)


def combine(first: Factors, second: Factors) -> Factors:
    """Return the sum of two adapters. Raises ModelError if their modules differ."""
    if first.modules != second.modules:
        unmatched = sorted(set(first.modules) ^ set(second.modules))
        fix = "train both with the same target_modules"
        got = f"{unmatched[0]} in one only"
        raise ModelError(explain("adapters", got, "the same modules", fix))
    first, second = first.scaled(), second.scaled()
    tensors = {
        name: torch.cat([tensor, second.tensors[name]], dim=0 if ".lora_A." in name else 1)
        for name, tensor in first.tensors.items()
    }
    return Factors(first.rank + second.rank, 1.0, tensors)


def truncate(adapter: Factors, rank: int) -> Factors:
    """Return the best approximation of an adapter by one of at most this rank (Eckart-Young)."""
    if rank >= adapter.rank:
        return adapter
    tensors = {}
    for module in adapter.modules:
        a, b = (f"{module}.lora_{letter}.weight" for letter in "AB")
        rows, inner_a = torch.linalg.qr(adapter.tensors[a].T)
        columns, inner_b = torch.linalg.qr(adapter.scale * adapter.tensors[b])
        u, values, v = torch.linalg.svd(inner_b @ inner_a.T)
        root = values[:rank].sqrt()
        tensors[a] = root[:, None] * (v[:rank] @ rows.T)
        tensors[b] = (columns @ u[:, :rank]) * root
    return Factors(rank, 1.0, tensors)


def largest_rank(adapter: Factors, dtype: torch.dtype) -> int:
    """Return the highest rank with which an adapter of these modules is within LIMIT_BYTES."""
    per_rank = sum(t.numel() for t in adapter.tensors.values()) * dtype.itemsize // adapter.rank
    return LIMIT_BYTES // per_rank


def write(
    adapter: Factors, out: Path, base: str, dialogue: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """Write a peft folder with the agent's settings; raises ModelError above LIMIT_BYTES."""
    adapter = adapter.scaled()
    size = sum(t.numel() for t in adapter.tensors.values()) * dtype.itemsize
    if size > LIMIT_BYTES:
        fix = "lower sft_rank or rl_rank in example/smollm2/run.sh"
        raise ModelError(explain("adapter", f"{size} bytes", f"at most {LIMIT_BYTES}", fix))
    config = peft_config_of_record({
        "lora_rank": adapter.rank,
        "lora_alpha": adapter.rank,
        "target_modules": {module.rpartition(".")[2] for module in adapter.modules},
        "base": base,
    })  # fmt: skip
    tensors = {name.removeprefix(PREFIX): t for name, t in sorted(adapter.tensors.items())}
    Adapter(config, tensors).write(out, dtype)
    (out / SETTINGS_FILE).write_text(json.dumps(dict(dialogue)) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="The adapters of a run for its first base.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", required=True, help="name of the base in the adapters")
    parser.add_argument("--template", required=True)
    for name in NUMBERS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, required=True)
    options = parser.parse_args()
    dialogue = {name: vars(options)[name] for name in ("template", *NUMBERS)}
    adapters = {"sft": Factors.read(options.out / "sft" / "adapter")}
    if (options.out / "rl").exists():  # else the run has only a cold start
        second = Factors.read(options.out / "rl" / "adapter")
        both = combine(adapters["sft"], second)
        adapters["rl"] = truncate(both, largest_rank(both, torch.bfloat16))
    for name in ("continued", "sampled"):  # trained on the first one, not beside it
        if (options.out / name).exists():
            adapters[name] = Factors.read(options.out / name / "adapter")
    for name, adapter in adapters.items():
        write(adapter, options.out / "adapters" / name, options.base, dialogue, torch.bfloat16)


if __name__ == "__main__":
    main()
