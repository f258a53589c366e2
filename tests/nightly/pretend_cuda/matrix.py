"""Cases of tier T0: each algorithm, offload and world size, and one that must fail."""

from __future__ import annotations

import itertools
from typing import Any

OFFLOADS = ("none", "param", "optimizer", "reference")
STEPS: list[dict[str, Any]] = [
    {"algorithm": algorithm, "offload": offload, "world": world, "dtype": "bfloat16", "budget": 512,
     "micro_batches": 2 if world == 8 else 1}
    for algorithm, offload, world in itertools.product(
        ("grpo", "ppo", "lora", "sft"), OFFLOADS, (1, 2, 8)
    )
    if algorithm != "sft" or offload == "none"  # SFT has no such option
]  # fmt: skip
for case in STEPS:
    case["by_ipc"] = case["algorithm"] in ("grpo", "lora") and case["offload"] == "param"
ONLY_NCCL = {"algorithm": "grpo", "offload": "param", "world": 2, "dtype": "bfloat16",
             "budget": 512, "micro_batches": 1, "only_nccl": True}  # fmt: skip
WHOLE = {"algorithm": "ppo", "offload": "none", "world": 8, "dtype": "bfloat16", "budget": 512,
         "micro_batches": 2, "reshard_each": False}  # fmt: skip
APART: list[dict[str, Any]] = [
    {"algorithm": "critic", "offload": offload, "world": world, "dtype": "bfloat16", "budget": 512,
     "micro_batches": 1}
    for offload, world in (("none", 1), ("none", 2), ("param", 2), ("optimizer", 2))
]  # fmt: skip
SEQUENCE_PARALLEL: list[dict[str, Any]] = [
    {"algorithm": algorithm, "offload": offload, "world": 8, "dtype": "bfloat16", "budget": 512,
     "micro_batches": 2, "sp_size": 4}
    for algorithm, offload in (("ppo", "none"), ("ppo", "param"), ("lora", "none"))
]  # fmt: skip
SELECTIVE: list[dict[str, Any]] = [
    {"algorithm": algorithm, "offload": "none", "world": 8, "dtype": "bfloat16", "budget": 512,
     "micro_batches": 2, "recompute": "selective"}
    for algorithm in ("ppo", "lora")
]  # fmt: skip
CASES = [*STEPS, ONLY_NCCL, WHOLE, *APART, *SEQUENCE_PARALLEL, *SELECTIVE]


def name(case: dict[str, Any]) -> str:
    """Return a readable name of a case."""
    words = [case[key] for key in ("algorithm", "offload", "world", "dtype")]
    flags = ("only_nccl", "reshard_each", "sp_size", "recompute")
    return "-".join(map(str, [*words, *(flag for flag in flags if flag in case)]))
