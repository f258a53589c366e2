"""Two adapters that were trained one above the other become one adapter over the first base.

With scales s and matrices A, B: s1 B1 A1 + s2 B2 A2 = [s1 B1 | s2 B2] [A1 over A2], so the ranks
add up and nothing is lost; the scales go into B, and the new adapter's own is 1.
`python -m example.smollm2.adapters --out OUT --base BASE` writes those of a run, in bfloat16.
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

from search_r1.inference.options import SETTINGS_FILE
from verl.errors import ModelError, explain
from verl.training.lora import PREFIX, Adapter, peft_config_of_record

WEIGHTS = "adapter_model.safetensors"
LIMIT_BYTES = 12_000_000
"""The largest adapter that is shipped."""


@dataclass(frozen=True)
class Factors:
    """An adapter: for each module A (rank, in) and B (out, rank), under peft's tensor names."""

    rank: int
    scale: float
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> Factors:
        """From peft's folder. Raises ModelError where there is none."""
        if not (folder / WEIGHTS).is_file():
            fix = "let the stage that trains it run first"
            raise ModelError(explain(f"adapter {folder}", "no such adapter", WEIGHTS, fix))
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = {name: t.float() for name, t in load_file(folder / WEIGHTS).items()}
        return cls(config["r"], config["lora_alpha"] / config["r"], tensors)

    @property
    def modules(self) -> list[str]:
        """The adapted modules, in peft's words and order."""
        end = ".lora_A.weight"
        return sorted(name.removesuffix(end) for name in self.tensors if name.endswith(end))

    def scaled(self) -> Factors:
        """The same adapter with its scale in B."""
        tensors = {n: self.scale * t if ".lora_B." in n else t for n, t in self.tensors.items()}
        return Factors(self.rank, 1.0, tensors)


def combine(first: Factors, second: Factors) -> Factors:
    """One adapter that adds what both add. Raises ModelError for adapters of different modules."""
    if first.modules != second.modules:
        odd = sorted(set(first.modules) ^ set(second.modules))
        fix = "train both with the same target_modules"
        raise ModelError(explain("adapters", f"{odd[0]} in one only", "the same modules", fix))
    one, two = first.scaled(), second.scaled()
    tensors = {
        name: torch.cat([tensor, two.tensors[name]], dim=0 if ".lora_A." in name else 1)
        for name, tensor in one.tensors.items()
    }
    return Factors(one.rank + two.rank, 1.0, tensors)


def write(
    adapter: Factors, out: Path, base: str, dialogue: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """Write peft's folder and how the agent was trained to talk.

    Raises ModelError for more bytes than are shipped.
    """
    whole = adapter.scaled()
    size = sum(t.numel() for t in whole.tensors.values()) * dtype.itemsize
    if size > LIMIT_BYTES:
        fix = "lower sft_rank or rl_rank in example/smollm2/run.sh"
        raise ModelError(explain("adapter", f"{size} bytes", f"at most {LIMIT_BYTES}", fix))
    config = peft_config_of_record({
        "lora_rank": whole.rank,
        "lora_alpha": whole.rank,
        "target_modules": {module.rpartition(".")[2] for module in whole.modules},
        "base": base,
    })  # fmt: skip
    tensors = {name.removeprefix(PREFIX): t for name, t in sorted(whole.tensors.items())}
    Adapter(config, tensors).write(out, dtype)
    (out / SETTINGS_FILE).write_text(json.dumps(dict(dialogue)) + "\n", encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Both adapters of a run over its first base.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", required=True, help="as the adapters shall name it")
    parser.add_argument("--template", required=True)
    parser.add_argument("--max-turns", type=int, required=True)
    parser.add_argument("--topk", type=int, required=True)
    given = parser.parse_args()
    dialogue = {name: vars(given)[name] for name in ("template", "max_turns", "topk")}
    first, second = (Factors.read(given.out / name / "adapter") for name in ("sft", "rl"))
    for name, adapter in {"sft": first, "rl": combine(first, second)}.items():
        write(adapter, given.out / "adapters" / name, given.base, dialogue, torch.bfloat16)


if __name__ == "__main__":
    main()
