"""The lock has only names and versions, and they satisfy pyproject.toml."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.install import EXTRAS, HASHES, LOCK, TORCH, VLLM_CPU
from scripts.lock import pins

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


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
    for wanted in map(Requirement, [*lines, TORCH, VLLM_CPU]):
        version = versions.get(canonicalize_name(wanted.name))
        assert version is not None, f"{wanted.name} is not in {LOCK.name}: run make lock"
        assert wanted.specifier.contains(version, prereleases=True), f"{wanted}: {version}"


def test_each_locked_version_has_the_hashes_of_its_files() -> None:
    """`--hashes` installs exactly the locked versions, and the list has no address either."""
    text = HASHES.read_text()
    blocks = re.findall(
        r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n?)+)", text, re.M
    )
    assert {canonicalize_name(name): version for name, version, _ in blocks} == locked()
    assert "://" not in text
