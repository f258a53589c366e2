"""The environments of vLLM's GPU wheels are what their locks and `verl.nvidia` say."""

from __future__ import annotations

import pytest

from tests.nightly.gpu_wheels.wheels import HERE, WHEELS, run
from verl.nvidia import CUDA12, CUDA13

pytestmark = pytest.mark.gpu_wheels
PACKAGES = ("vllm", "torch", "transformers", "ray", "peft")


@pytest.mark.parametrize("wheel", WHEELS)
def test_torch_and_vllm_are_built_with_the_cuda_that_the_driver_was_asked_for(wheel: str) -> None:
    """A driver runs the programs of its own major CUDA version and of older ones."""
    expected = CUDA12 if wheel == "cuda12" else CUDA13
    report = run(wheel, "libraries.py", " ".join(PACKAGES))
    assert tuple(map(int, report["torch"].split("."))) == expected.cuda
    assert report["vllm"] == [expected.cuda[0]]


@pytest.mark.parametrize("wheel", WHEELS)
def test_the_locked_versions_are_installed(wheel: str) -> None:
    """What these tests check is what the installer installs."""
    lines = (HERE / f"{wheel}.txt").read_text().splitlines()
    locked = dict(line.split("==") for line in lines if "==" in line and ";" not in line)
    versions = run(wheel, "libraries.py", " ".join(PACKAGES))["versions"]
    installed = {name: version.partition("+")[0] for name, version in versions.items()}
    assert installed == {name: locked.get(name, installed[name]) for name in PACKAGES}
