"""Reads what this machine has: memory (host, within container limits; /dev/shm; GPUs), threads."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

SHARED_MEMORY = Path("/dev/shm")
ENLARGE_SHARED_MEMORY = f"mount -o remount,size=90% {SHARED_MEMORY}, or docker run --shm-size"
"""How to enlarge it, for error messages."""
CONTROL_GROUPS = Path("/sys/fs/cgroup")
GB = 1e9
PRINT_DEVICES = ("import json; from verl.machine import device_memory; "
                 "print(json.dumps([(d.total, d.free) for d in device_memory()]))")  # fmt: skip
NO_LIMIT = 1 << 60
"""cgroup v1 writes "no limit" as a number larger than any machine's memory."""


def num_threads() -> int:
    """Return how many threads this process may compute with: OMP_NUM_THREADS, or else its cores."""
    return int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class HostMemory:
    """Memory in bytes of the host, or of the container if that has less."""

    total: int
    free: int
    """Memory that processes can still allocate, including file pages the kernel can drop."""

    @property
    def used_share(self) -> float:
        """Fraction of the memory in use, from 0 to 1."""
        return 1 - self.free / self.total

    @classmethod
    def now(cls, membership: Path = Path("/proc/self/cgroup")) -> "HostMemory":
        """Return this machine's memory; `membership` lists this process's control groups."""
        physical = psutil.virtual_memory()
        limits = [cls(physical.total, physical.available), *control_groups(membership)]
        total = min(memory.total for memory in limits)
        return cls(total, min(total, *(memory.free for memory in limits)))


def control_groups(membership: Path, mount: Path = CONTROL_GROUPS) -> Iterator[HostMemory]:
    """Yield the memory of this process's control group and its parents, as far as limited."""
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, controllers, path = line.split(":", 2)
        root, names = mount, ("memory.max", "memory.current", "inactive_file")
        if controllers:  # cgroup v1
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            root = mount / "memory"
        if not controllers or "memory" in controllers.split(","):
            group = root / path.strip("/")
            for folder in (group, *group.parents):
                memory = _group_memory(folder, *names) if folder.is_relative_to(root) else None
                if memory is not None:
                    yield memory


def _group_memory(folder: Path, limit: str, usage: str, droppable: str) -> HostMemory | None:
    """Return the memory of a group; None if it has no limit or is unreadable."""
    try:
        limit_text = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if limit_text == "max" or int(limit_text) >= NO_LIMIT:
        return None
    total = int(limit_text)
    statistics = dict(line.split() for line in lines)
    return HostMemory(total, max(0, total - used + int(statistics.get(droppable, 0))))


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one GPU in bytes."""

    total: int
    free: int


@dataclass(frozen=True)
class Machine:
    """Memory available to a run on this machine."""

    host: HostMemory
    shared_free: int | None
    """Free bytes of /dev/shm; None if it does not exist and a temporary folder is used."""
    devices: tuple[DeviceMemory, ...] = ()

    @classmethod
    def now(cls, with_devices: bool) -> Self:
        """Return this machine's memory, including its GPUs if `with_devices`."""
        shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else None
        return cls(HostMemory.now(), shared, _devices_by_child() if with_devices else ())


def device_memory() -> tuple[DeviceMemory, ...]:
    """Return the memory of every visible GPU; creates a CUDA context on each of them."""
    import torch  # noqa: PLC0415 - servers without GPUs need no torch

    infos = (torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count()))
    return tuple(DeviceMemory(total, free) for free, total in infos)


def _devices_by_child() -> tuple[DeviceMemory, ...]:
    """Return `device_memory()` of a child process, with which its CUDA contexts end."""
    # No child of `multiprocessing`: that would execute the user's script, and so the run, again.
    path = [folder for folder in sys.path if isinstance(folder, str)]  # import ignores other types
    child = [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {PRINT_DEVICES}"]
    done = subprocess.run(child, stdout=subprocess.PIPE, check=True)
    devices = json.loads(done.stdout.splitlines()[-1])  # a sitecustomize.py may print lines before
    return tuple(DeviceMemory(total, free) for total, free in devices)


def format_bytes(count: float) -> str:
    """Format a number of bytes for people: 512 MB, 1.5 GB, 61.3 GB."""
    if count < GB / 10:
        return f"{count / 1e6:.3g} MB"
    return f"{count / GB:.3g} GB" if count < 10 * GB else f"{count / GB:.1f} GB"
