"""Bytes of matrices and models, what is free on this machine, and what this process holds."""

import math
from dataclasses import dataclass
from pathlib import Path

import psutil
from safetensors import SafetensorError, safe_open

from search_r1.search.errors import SetupError

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Bytes of a value by dtype."""
QUERY_BLOCK = 256
"""Queries whose scores of a tile the torch backend holds at once."""
CGROUPS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Files of the limit and the usage, and the entry of memory.stat that can be dropped, by the folder
under which version 2 and version 1 are mounted."""


def bytes_of_matrix(dtype: str, rows: int, dim: int) -> int:
    """Bytes of `rows` × `dim` values in `dtype`; int8 has a float32 scale per row as well."""
    return rows * (dim * item_bytes(dtype) + (4 if dtype == "int8" else 0))


def item_bytes(dtype: str) -> int:
    """Bytes of one value; raises SetupError for a dtype that no backend has."""
    if dtype not in ITEM_BYTES:
        raise SetupError(f"dtype {dtype!r}; expected {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def bytes_of_model(name: str, dtype: str) -> int | None:
    """Bytes of a model folder's weights in `dtype`; None for a model that is not on this disk.

    Counts the parameters of safetensors files; of `.bin` files the bytes, taken as float32.
    """
    folder = Path(name).expanduser()
    counts = [_num_values(path) for path in folder.rglob("*.safetensors")]
    counts = counts or [path.stat().st_size // 4 for path in folder.rglob("*.bin")]
    return sum(counts) * item_bytes(dtype) if counts else None


def _num_values(path: Path) -> int:
    """Values in a safetensors file, by its header alone."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())  # the file is no mapping: it has no iterator
            return sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    except SafetensorError as error:
        raise SetupError(
            f"{path} is not a safetensors file ({error}); expected a complete model folder: "
            "download it again"
        ) from error


@dataclass(frozen=True)
class Host:
    """Free memory of a machine at one moment, in bytes."""

    free: int
    """Host memory, within the limit of the container."""
    gpus: tuple[int, ...] = ()
    """Free bytes of cuda:0, cuda:1 ..."""

    @classmethod
    def measure(cls, *, with_gpus: bool) -> "Host":
        """This machine now; `with_gpus` loads torch."""
        free = int(psutil.virtual_memory().available)
        limit = cgroup_free()
        return cls(free if limit is None else min(free, limit), _free_gpus() if with_gpus else ())


def _free_gpus() -> tuple[int, ...]:
    import torch  # noqa: PLC0415  (BM25 does without)

    return tuple(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))


def cgroup_free(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes left below the tightest memory limit of our control groups; None without a limit.

    Reads version 1 and 2; file pages that the kernel can drop count as free.
    """
    if not membership.is_file():
        return None
    free = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        folder = "memory" if "memory" in controllers.split(",") else controllers
        if folder in CGROUPS:
            top = mount / folder
            group = top / path.strip("/")
            around = [g for g in (group, *group.parents) if g.is_relative_to(top)]
            free += [left for g in around if (left := _left(g, *CGROUPS[folder])) is not None]
    return min(free, default=None)


def _left(group: Path, limit: str, usage: str, droppable: str) -> int | None:
    """Free bytes of one control group; None without a limit."""
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        stat = (group / "memory.stat").read_text()
    except OSError:  # the root of a hierarchy, or a mount without this group, has no limit
        return None
    facts = dict(row.split() for row in stat.splitlines())
    return None if most == "max" else max(0, int(most) - used + int(facts.get(droppable, 0)))


def resident() -> dict[str, int]:
    """Bytes of memory that this process holds: its own, and the pages of files that it maps.

    Mapped pages are shared with other processes that read the file, and the kernel can drop them.
    """
    held = psutil.Process().memory_info()
    mapped = int(getattr(held, "shared", 0))  # only Linux tells
    return {"own": int(held.rss) - mapped, "mapped": mapped}
