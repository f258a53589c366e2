"""What the processor of this machine can do, read from the kernel: torch 2.10 cannot tell."""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}


def has_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the processor has instructions for bfloat16; False where nothing tells."""
    if not cpuinfo.is_file():
        return False
    lines = (line.partition(":") for line in cpuinfo.read_text(encoding="utf-8").splitlines())
    flags = next((value for name, _, value in lines if name.strip() == "flags"), "")
    return not BFLOAT16_FLAGS.isdisjoint(flags.split())
