"""Prints with which CUDA an environment's torch and vLLM were built: `libraries.py PACKAGE...`.

A script for an environment of vLLM's GPU wheel. It prints JSON: torch's CUDA version, the major
versions of the CUDA runtime that vLLM's libraries load, and the installed versions of the packages.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import torch


def runtimes() -> list[int]:
    """Return the major versions of the CUDA runtime that vLLM's libraries name."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    found: set[int] = set()
    for library in Path(spec.origin).parent.rglob("*.so"):
        names = re.findall(rb"libcudart\.so\.(\d+)", library.read_bytes())
        found |= {int(major) for major in names}
    return sorted(found)


if __name__ == "__main__":
    installed = {name: version(name) for name in sys.argv[1].split()}
    report = {"torch": torch.version.cuda, "vllm": runtimes(), "versions": installed}
    print(json.dumps(report))  # noqa: T201
