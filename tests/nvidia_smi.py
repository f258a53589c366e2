"""A stand-in for `nvidia-smi`: a shell script that prints a given machine's output."""

from collections.abc import Sequence
from pathlib import Path

H100 = "NVIDIA H100 80GB HBM3, 81559, 9.0, Disabled"
SLICED = "NVIDIA H100 80GB HBM3, 81559, 9.0, Enabled"
SLICES = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n  MIG 1g.10gb     Device  0: (UUID: MIG-2)"
BROKEN = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that "
    "the latest NVIDIA driver is installed and running."
)


def write_program(path: Path, body: str) -> Path:
    """Write an executable shell script that uses only the shell's own commands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def write_nvidia_smi(
    folder: Path,
    cards: Sequence[str] = (H100,),
    driver: str = "580.65.06",
    header: str = "CUDA Version: 13.0",
    listed: str = "",
) -> None:
    """`cards` are rows of name, memory in MiB, capability, MIG mode; `listed` is what -L prints."""
    rows = "\n".join(f"{driver}, {card}" for card in cards) or "No devices were found"
    body = f'''case "$1" in
--query-gpu=*) printf '%s\\n' "{rows}" ;;
-L) printf '%s\\n' "{listed}" ;;
*) printf '%s\\n' "| NVIDIA-SMI {driver}   Driver Version: {driver}   {header} |" ;;
esac'''
    write_program(folder / "nvidia-smi", body)


def write_broken_nvidia_smi(folder: Path) -> None:
    """Write an `nvidia-smi` that fails as after a driver update without a reboot."""
    write_program(folder / "nvidia-smi", f'printf "%s\\n" "{BROKEN}"; exit 9')
