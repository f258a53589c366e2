"""The memory of this machine now: host (within the container's limit), /dev/shm, GPUs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
ENLARGE_SHARED_MEMORY = f"mount -o remount,size=90% {SHARED_MEMORY}, or docker run --shm-size"
"""What gives it more room."""
CONTROL_GROUPS = Path("/sys/fs/cgroup")
GB = 1e9
ASK_DEVICES = ("import json; from verl.machine import device_memory; "
               "print(json.dumps([(one.total, one.free) for one in device_memory()]))")  # fmt: skip
NO_LIMIT = 1 << 60
"""Version 1 writes an unlimited group as a number beyond any machine."""


@dataclass(frozen=True)
class HostMemory:
    """The host's memory, or the container's where that has less, in bytes."""

    total: int
    free: int
    """What processes may still take; file pages that the kernel can drop count as free."""

    @property
    def used_share(self) -> float:
        """Share that is taken, from 0 to 1."""
        return 1 - self.free / self.total

    @classmethod
    def now(cls, membership: Path = Path("/proc/self/cgroup")) -> HostMemory:
        """This machine's."""
        physical = psutil.virtual_memory()
        found = [cls(physical.total, physical.available), *control_groups(membership)]
        total = min(memory.total for memory in found)
        return cls(total, min(total, *(memory.free for memory in found)))


def control_groups(membership: Path, mount: Path = CONTROL_GROUPS) -> Iterator[HostMemory]:
    """The limit of our control group and of each around it, as far as they have one."""
    for line in membership.read_text().splitlines() if membership.is_file() else ():
        _, controllers, path = line.split(":", 2)
        root, names = mount, ("memory.max", "memory.current", "inactive_file")
        if controllers:  # of version 1
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            root = mount / "memory"
        if not controllers or "memory" in controllers.split(","):
            folder = root / path.strip("/")
            for around in (folder, *folder.parents):
                found = _group(around, *names) if around.is_relative_to(root) else None
                if found is not None:
                    yield found


def _group(folder: Path, limit: str, usage: str, droppable: str) -> HostMemory | None:
    """One group's memory; None where it has no limit, or is not there to be read."""
    try:
        words = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if words == "max" or int(words) >= NO_LIMIT:
        return None
    facts = dict(line.split() for line in lines)
    return HostMemory(int(words), max(0, int(words) - used + int(facts.get(droppable, 0))))


@dataclass(frozen=True)
class DeviceMemory:
    """One GPU's memory in bytes."""

    total: int
    free: int


@dataclass(frozen=True)
class Machine:
    """What a run may take here."""

    host: HostMemory
    shared_free: int | None
    """Of /dev/shm; None where there is none and a temporary folder takes its place."""
    devices: tuple[DeviceMemory, ...] = ()

    @classmethod
    def now(cls, with_devices: bool) -> Machine:
        """This machine; `with_devices` asks the GPUs too."""
        shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.exists() else None
        return cls(HostMemory.now(), shared, _devices_by_child() if with_devices else ())


def device_memory() -> tuple[DeviceMemory, ...]:
    """Every visible GPU; asking makes a context on each of them."""
    import torch  # noqa: PLC0415 - servers without GPUs do without

    found = (torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count()))
    return tuple(DeviceMemory(total, free) for free, total in found)


def _devices_by_child() -> tuple[DeviceMemory, ...]:
    """As `device_memory`, by a process whose contexts end with it.

    Its program is its own: `multiprocessing` would begin a user's script, and so his run, again.
    """
    path = [folder for folder in sys.path if isinstance(folder, str)]  # as imports take them
    child = [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {ASK_DEVICES}"]
    done = subprocess.run(child, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout.splitlines()[-1])  # before it, what a sitecustomize.py prints
    return tuple(DeviceMemory(total, free) for total, free in found)


def format_bytes(count: float) -> str:
    """Bytes as one reads them: 512 MB, 1.5 GB, 61.3 GB."""
    if count < GB / 10:
        return f"{count / 1e6:.3g} MB"
    return f"{count / GB:.3g} GB" if count < 10 * GB else f"{count / GB:.1f} GB"
