"""Writes the locks, which are constraints for pip: `make lock`, `make lock-gpu`.

`requirements.lock` describes the environment in which the test suite ran, so it is read from there
and not resolved again. With `--gpu`, the newest versions that pyproject.toml and vLLM's GPU wheel
allow are resolved from the metadata of packages, without a GPU and without downloading a wheel. A
lock has names and versions only: no index, no folder, no machine-specific build.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.install import EXTRAS, GPU_LOCKS, HASHES, LOCK, ROOT, TORCH
from verl.nvidia import WHEELS

TOOLS = {"pip", "pip-tools", "setuptools", "wheel", "uv", "build", "pyproject_hooks"}
"""Installation tools, which are not locked."""
HEAD = (
    "# What the CPU suite ran with; written by `make lock`, read by `make install` (CPU builds).\n"
)
GPU_HEAD = "# Written by `make lock-gpu`, read by `make install` and `make test-gpu-wheels`.\n"
GPU_EXTRAS = (*EXTRAS, "lucene", "docs")
"""What the Makefile installs beside the engine; no constraint stands in the way of an extra."""
PYTHONS = ("3.13", "3.12", "3.11")
"""Versions of Python that a GPU lock is made for. Newest first, because the versions found for one
are preferred for the next, and the newest Python has the fewest wheels to choose from."""


def pins(frozen: str) -> list[str]:
    """Return the `name==version` lines of `pip freeze`, without tools and build tags (`+cpu`)."""
    lines = (re.fullmatch(r"([\w.-]+)==([^+\s]+)(?:\+\S+)?", line) for line in frozen.split("\n"))
    kept = [f"{pin[1]}=={pin[2]}" for pin in lines if pin and pin[1].lower() not in TOOLS]
    return sorted(kept, key=str.lower)


def merge(resolved: Mapping[str, Sequence[str]]) -> list[str]:
    """Merge the pins of several Pythons; a pin that not all of them have gets a marker."""
    pythons: dict[str, list[str]] = {}
    for python, lines in resolved.items():
        for pin in lines:
            pythons.setdefault(pin, []).append(python)
    lines = [
        pin
        if len(versions) == len(resolved)
        else f'{pin}; python_version in "{" ".join(sorted(versions))}"'
        for pin, versions in pythons.items()
    ]
    return sorted(lines, key=str.lower)


def resolve(extras: Sequence[str]) -> dict[str, list[str]]:
    """Return the newest allowed pins of the project with `extras`, by version of Python."""
    resolved = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lock.txt"  # uv prefers the versions that are in it
        for python in PYTHONS:
            wanted = [f"--extra={extra}" for extra in extras]
            uv_compile(ROOT / "pyproject.toml", out, *wanted, "--python-version", python)
            resolved[python] = pins(out.read_text(encoding="utf-8"))
    return resolved


def uv_compile(source: Path, out: Path, *options: str) -> None:
    """Resolve the requirements in `source` into `out`. Raises CalledProcessError if uv fails."""
    quiet = ["--no-header", "--no-annotate", "--quiet", *options]
    command = [sys.executable, "-m", "uv", "pip", "compile", *quiet, str(source), "-o", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def lock_environment() -> None:
    """Write lock and hashes of the environment of this interpreter."""
    command = [sys.executable, "-m", "pip", "freeze", "--all", "--exclude-editable"]
    frozen = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    LOCK.write_text(HEAD + "".join(f"{pin}\n" for pin in pins(frozen)), encoding="ascii")
    write_hashes()


def write_hashes() -> None:
    """Write the hashes of the locked versions, and of the libraries that PyPI's torch requires.

    The environment may lack these, with a CPU build of torch, whose file the list does not have.
    """
    uv_compile(LOCK, HASHES, "--no-deps", "--generate-hashes")
    with tempfile.TemporaryDirectory() as folder:
        wanted, found = Path(folder) / "torch.in", Path(folder) / "torch.txt"
        wanted.write_text(TORCH)
        uv_compile(wanted, found, "-c", str(LOCK), "--generate-hashes")
        blocks = re.split(r"^(?=\w)", found.read_text(encoding="ascii"), flags=re.MULTILINE)
    known = HASHES.read_text(encoding="ascii")
    added = [b for b in blocks if b and b not in known and b.partition("==")[0] not in TOOLS]
    HASHES.write_text(known + "".join(added), encoding="ascii")


def lock_gpu() -> None:
    """Write the locks of the GPU builds."""
    for wheels in WHEELS:
        lines = merge(resolve([*GPU_EXTRAS, wheels.extra]))
        text = GPU_HEAD + "".join(f"{line}\n" for line in lines)
        (GPU_LOCKS / wheels.lock).write_text(text, encoding="ascii")


def main() -> None:
    """Write the locks of the CPU build, or those of the GPU builds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="resolve the GPU build's versions again")
    if parser.parse_args().gpu:
        lock_gpu()
    else:
        lock_environment()


if __name__ == "__main__":
    main()
