"""What this machine has, and whether everything that a run imports can be imported."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import torch

from scripts.gpu_checks.report import Report

NEEDED = ("verl.trainer.run", "verl.sft.trainer", "search_r1.search.retrieval_server")
"""What the recipes start; vLLM is tried by the engine's own checks."""


def check(report: Report) -> None:
    """What `verl.doctor` finds and misses, and a failure for each import that fails."""
    doctor = [sys.executable, "-m", "verl.doctor", "--json"]
    with report.part("verl.doctor"):
        found = json.loads(subprocess.run(doctor, stdout=subprocess.PIPE, timeout=90).stdout)
        for line in found["lines"]:
            report.record(line["name"], line["found"])
            if line["problem"] and line["stops"]:
                report.fail(line["problem"])
    for module in NEEDED:
        with report.part(f"import {module}"):
            importlib.import_module(module)
    if report.on_card:
        a = torch.randn(512, 512, device="cuda")
        error = float((a @ a - (a.double() @ a.double()).float()).abs().max())
        report.expect("float32_product_error", error, below=1e-2)
