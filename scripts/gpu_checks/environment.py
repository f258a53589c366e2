"""Records what this machine has, and checks that everything a run imports can be imported."""

import importlib
import json
import subprocess
import sys

import torch

from scripts.gpu_checks.report import Report

MODULES = ("verl.trainer.run", "verl.ext.sft.trainer", "search_r1.retrieval.server")
"""Modules that the recipes run; vLLM is covered by the engine checks."""


def check(report: Report) -> None:
    """Record the report of `verl.doctor`, and fail for its problems and for failed imports."""
    doctor = [sys.executable, "-m", "verl.doctor", "--json"]
    with report.part("verl.doctor"):
        output = subprocess.run(doctor, stdout=subprocess.PIPE, timeout=90).stdout
        for line in json.loads(output)["lines"]:
            report.record(line["name"], line["found"])
            if line["problem"] and line["stops"]:
                report.fail(line["problem"])
    for module in MODULES:
        with report.part(f"import {module}"):
            importlib.import_module(module)
    if report.on_card:
        a = torch.randn(512, 512, device="cuda")
        error = float((a @ a - (a.double() @ a.double()).float()).abs().max())
        report.expect("float32_product_error", error, below=1e-2)
