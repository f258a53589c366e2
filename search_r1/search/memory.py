"""Bytes of indexes and models by formula, and what is free on this machine.

Formulas per vector of `d` values, from the FAISS wiki (Faiss indexes; Guidelines to choose an
index): Flat 4·d, HNSW adds M·2·4 for its links, an inverted file adds 8 for the id, SQ8 is d, PQ
is its code. Whether an engine fits is decided in `preflight`.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import psutil
from safetensors import SafetensorError, safe_open

from search_r1.search.errors import SetupError

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}
"""Bytes of a value by dtype."""
CODE_BITS = {"Flat": 32, "SQ8": 8, "SQ6": 6, "SQ4": 4, "SQfp16": 16, "SQbf16": 16}
"""Bits of a value by the code's name in a FAISS factory string."""
QUERY_BLOCK = 256
"""Queries whose scores of a tile the torch engine holds at once."""
ID_BYTES = 8
LINK_BYTES = 4
NODE_BYTES = 16
"""HNSW, beside M·2·4: where a row's links begin (8), its level (4), links of upper levels (~4)."""


def bytes_of_index(engine: str, dtype: str, rows: int, dim: int, *, factory: str = "Flat") -> int:
    """Bytes of a loaded index of `rows` × `dim`, all devices together.

    `engine` is `torch` (a matrix of `dtype`; int8 has a float32 scale per row), `faiss_gpu` (Flat
    of `dtype`, float16 as the server loads it) or `faiss` (whatever `factory` says; dtype is the
    factory's). Raises SetupError for a factory string whose size is not known.
    """
    if engine == "faiss":
        return _factory_bytes(factory, rows, dim)
    scales = 4 * rows if dtype == "int8" else 0
    return rows * dim * item_bytes(dtype) + scales


def item_bytes(dtype: str) -> int:
    """Bytes of one value; raises SetupError for a dtype that no engine has."""
    if dtype not in ITEM_BYTES:
        raise SetupError(f"dtype {dtype!r}; expected {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def _factory_bytes(factory: str, rows: int, dim: int) -> int:
    """Bytes of the FAISS index that `factory` describes, with tables shared by all rows."""
    per_row, shared, code = 0, 0, "Flat"
    for part in re.split(r"[,_]", factory):
        if match := re.fullmatch(r"HNSW(\d+)?", part):
            links = int(match[1] or 32)
            per_row += links * 2 * LINK_BYTES + NODE_BYTES
        elif match := re.fullmatch(r"IVF(\d+)", part):
            per_row += ID_BYTES
            shared += int(match[1]) * dim * 4
        elif match := re.fullmatch(r"OPQ\d+", part):
            shared += dim * dim * 4
        elif match := re.fullmatch(r"PCA[RW]?(\d+)", part):
            shared += dim * (dim + int(match[1])) * 4
            dim = int(match[1])
        elif part in CODE_BITS or re.fullmatch(PQ, part):
            code = part
        else:
            raise SetupError(
                f"the size of a FAISS index {factory!r} is not known: {KNOWN_FACTORIES}"
            )
    code_bytes, table = _code_bytes(code, dim)
    return rows * (per_row + code_bytes) + shared + table


PQ = r"PQ(\d+)(?:x(\d+))?(?:fs)?"
KNOWN_FACTORIES = (
    "expected Flat, SQ8, PQ64 and the like, alone or after IVF4096 or HNSW32, for example "
    "IVF4096,SQ8"
)


def _code_bytes(code: str, dim: int) -> tuple[int, int]:
    """Bytes of a row's code, and of the table that all codes share."""
    if match := re.fullmatch(PQ, code):
        bits = int(match[2] or 8)
        return math.ceil(int(match[1]) * bits / 8), dim * 2**bits * 4
    return math.ceil(dim * CODE_BITS[code] / 8), 0


def bytes_of_model(name: str, dtype: str) -> int | None:
    """Bytes of a model folder's weights in `dtype`; None for a model that is not on this disk.

    Counts the parameters of safetensors files; of `.bin` files the bytes, taken as float32.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return None
    tensors = [_num_values(path) for path in folder.rglob("*.safetensors")]
    if not tensors:
        tensors = [path.stat().st_size // 4 for path in folder.rglob("*.bin")]
    return sum(tensors) * item_bytes(dtype) if tensors else None


def _num_values(path: Path) -> int:
    """Values in a safetensors file, by its header alone."""
    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
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
        limits = [int(psutil.virtual_memory().available)]
        if (limit := cgroup_free()) is not None:
            limits.append(limit)
        return cls(min(limits), _free_gpus() if with_gpus else ())


def _free_gpus() -> tuple[int, ...]:
    import torch  # noqa: PLC0415

    return tuple(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count()))


def cgroup_free(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Bytes left below the tightest memory limit of our control groups; None without a limit.

    Reads version 1 and 2; file pages that the kernel can drop count as free.
    """
    if not membership.is_file():
        return None
    found = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _free_up_to(mount, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _free_up_to(mount / "memory", path, *names)
    return min(found, default=None)


def _free_up_to(mount: Path, path: str, limit: str, usage: str, droppable: str) -> list[int]:
    """Free bytes of the group at `path` and of those around it, as far as they have a limit."""
    group = mount / path.strip("/")
    found = []
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            break
        try:
            most = (folder / limit).read_text().strip()
            used = int((folder / usage).read_text())
            stat = (folder / "memory.stat").read_text()
        except OSError:  # the root of a hierarchy, or a mount without this group, has no limit
            continue
        if most != "max":
            facts = dict(row.split() for row in stat.splitlines())
            found.append(max(0, int(most) - used + int(facts.get(droppable, 0))))
    return found
