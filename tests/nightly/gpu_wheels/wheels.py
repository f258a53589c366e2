"""Environments of vLLM's GPU wheel, scripts that run in them, and the simulated cards.

`python -m tests.nightly.gpu_wheels.wheels` prints docs/evidence/vllm_settings.md.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENVIRONMENTS = Path(os.environ.get("GPU_WHEELS", ROOT / ".gpu-wheels")).absolute()
WHEELS = ("oldest", "newest", "cuda12")
"""Both ends of the range in pyproject.toml, and the wheels for drivers without CUDA 13."""
DRIVER_FUNCTIONS = (
    "cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain",
    "cuGetErrorString", "cuGetProcAddress_v2", "cuMemAddressFree", "cuMemAddressReserve",
    "cuMemCreate", "cuMemGetAllocationGranularity", "cuMemMap", "cuMemRelease", "cuMemSetAccess",
    "cuMemUnmap", "cuPointerGetAttribute", "cuTensorMapEncodeTiled",
)  # fmt: skip
"""Functions of libcuda that vLLM's libraries need when they are loaded; none is called."""
CARDS = {
    "T4": {"name": "Tesla T4", "gib": 16, "capability": [7, 5], "count": 2},
    "V100": {"name": "Tesla V100", "gib": 32, "capability": [7, 0], "count": 8},
    "RTX 4090": {"name": "NVIDIA GeForce RTX 4090", "gib": 24, "capability": [8, 9], "count": 2},
    "A100": {"name": "NVIDIA A100-SXM4-80GB", "gib": 80, "capability": [8, 0], "count": 8},
    "H100": {"name": "NVIDIA H100 80GB HBM3", "gib": 80, "capability": [9, 0], "count": 8},
    "H200": {"name": "NVIDIA H200", "gib": 141, "capability": [9, 0], "count": 8},
}
OLD, NEW = ("T4", "V100"), ("RTX 4090", "A100", "H100", "H200")
"""Cards without and with bfloat16 (capability 8.0 and up)."""
ROLLOUT = "actor_rollout_ref.rollout"
KWARGS = f"{ROLLOUT}.engine_kwargs"
SEQS = 320
"""Dialogues per engine in the GRPO recipe on 8 GPUs."""
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "TP 2": {f"{ROLLOUT}.tensor_model_parallel_size": 2},
    "LoRA 64": {"actor_rollout_ref.model.lora_rank": 64},
    "ngram": {KWARGS: {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}}},
    "fp8": {KWARGS: {"quantization": "fp8_per_tensor", "kv_cache_dtype": "fp8"}},
    "deterministic": {
        "trainer.deterministic": True, f"{ROLLOUT}.tensor_model_parallel_size": 2,
    },
}  # fmt: skip
SAVING = ("ngram", "fp8")
"""Variants for new cards only."""
Case = tuple[str, str, str]
"""Card, dtype, variant."""
CASES: list[Case] = [
    *((card, "bfloat16", variant) for card in NEW for variant in VARIANTS),
    *((card, "float16", variant) for card in OLD for variant in VARIANTS if variant not in SAVING),
    ("T4", "bfloat16", "plain"),
    ("H100", "float16", "plain"),
    ("H100", "float32", "plain"),
]


@cache
def stub_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with a libcuda that answers "no device" (100) to every call."""
    folder = tempfile.TemporaryDirectory()
    source = Path(folder.name) / "libcuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in DRIVER_FUNCTIONS))
    target = source.with_name("libcuda.so.1")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return folder


def run(wheel: str, script: str, argument: str) -> Any:
    """Run a script of this folder in an environment; returns the JSON on its last line."""
    python = ENVIRONMENTS / wheel / "bin" / "python"
    assert python.exists(), f"there is no {python}: make test-gpu-wheels, or set GPU_WHEELS"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "CUDA_"))}
    env = {**kept, "PYTHONPATH": str(ROOT), "LD_LIBRARY_PATH": stub_folder().name}
    command = [str(python), str(HERE / script), argument]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@cache
def settings(wheel: str) -> dict[Case, dict[str, Any]]:
    """Return the resolved settings of each case."""
    cases = [
        {
            "card": CARDS[card],
            "engine": {
                f"{ROLLOUT}.max_num_seqs": SEQS,
                f"{ROLLOUT}.dtype": dtype,
                **VARIANTS[variant],
            },
        }
        for card, dtype, variant in CASES
    ]
    return dict(zip(CASES, run(wheel, "settings.py", json.dumps(cases)), strict=True))


def page() -> str:
    """Return the settings of all wheels as a page: one row per case, more where they differ."""
    resolved = {wheel: settings(wheel) for wheel in WHEELS}
    versions = [next(iter(resolved[wheel].values()))["vllm"] for wheel in WHEELS]
    first = next(iter(resolved["newest"].values()))
    columns = [key for key in first if key not in ("vllm", "dtype")]
    lines = [
        "# How vLLM interprets our options",
        "",
        f"vLLM's GPU wheels {', '.join(versions)} on simulated GPUs, without running any kernel; "
        f"{SEQS} dialogues per",
        "engine, the shape of Qwen2.5-3B. Printed on "
        f"{datetime.date.today()} by `GPU_WHEELS=... python -m tests.nightly.gpu_wheels.wheels`;",
        "`make test-gpu-wheels` checks the values. `kernels`: whether torch supports the card.",
        "",
        "| card | dtype | engine | vLLM | " + " | ".join(columns) + " |",
        "|---" * (4 + len(columns)) + "|",
    ]
    for case in CASES:
        rows: list[tuple[list[str], dict[str, Any]]] = []
        for wheel, version in zip(WHEELS, versions, strict=True):
            answer = {**resolved[wheel][case], "vllm": ""}
            same = next((names for names, known in rows if known == answer), None)
            if same is None:
                rows.append(([version], answer))
            else:
                same.append(version)
        for names, answer in rows:
            label = "all" if len(names) == len(WHEELS) else ", ".join(names)
            cells = [str(answer.get(key, "")) for key in columns]
            if "error" in answer:
                cells = [answer["error"].partition(". ")[0], *cells[1:]]
            lines.append("| " + " | ".join([*case, label, *cells]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201
