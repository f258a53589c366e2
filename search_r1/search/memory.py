"""Bytes of matrices and models, what is free on this machine, and what this process holds."""

import math
from dataclasses import dataclass
from pathlib import Path

import psutil
from safetensors import SafetensorError, safe_open

from search_r1.search.errors import SetupError
from verl.machine import HostMemory, device_memory

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Bytes of a value by dtype."""
QUERY_BLOCK = 256
"""Queries whose scores of a tile the torch backend holds at once."""


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
        gpus = tuple(gpu.free for gpu in device_memory()) if with_gpus else ()
        return cls(HostMemory.now().free, gpus)


def resident() -> dict[str, int]:
    """Bytes of memory that this process holds: its own, and the pages of files that it maps.

    Mapped pages are shared with other processes that read the file, and the kernel can drop them.
    """
    held = psutil.Process().memory_info()
    mapped = int(getattr(held, "shared", 0))  # only Linux tells
    return {"own": int(held.rss) - mapped, "mapped": mapped}
