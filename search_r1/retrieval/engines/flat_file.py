"""Memory-mapped access to the rows of a FAISS Flat index file, without FAISS.

The layout is that of `faiss.write_index`: `HEADER`, then the float32 rows, which begin at byte 45,
so that they are never aligned in memory.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from search_r1.retrieval.errors import IndexMismatch, SetupError
from verl.files import regular_file

Vectors = npt.NDArray[np.float32]

HEADER = struct.Struct("<4siqqq?iQ")
"""Kind, dim, rows, two unused integers, whether trained, metric, number of values that follow."""
KINDS = {b"IxFI": 0, b"IxF2": 1, b"IxFl": None}
"""Kinds of Flat indexes and the metric that each implies."""
METRICS = {0: "inner_product", 1: "l2"}


@dataclass(frozen=True)
class FlatFile:
    """Rows and metric of a Flat index file."""

    path: Path
    metric: str
    """`inner_product`, or `l2` (squared distance: lower fits better)."""
    vectors: Vectors
    """(num_rows, dim), a memory map of the file."""

    @classmethod
    def open(cls, path: Path) -> "FlatFile":
        """Map the file; raises SetupError if it is missing, cut off, or not a Flat index."""
        num_rows, dim, metric = read_shape(path)
        vectors = np.memmap(path, np.dtype("<f4"), "r", HEADER.size, (num_rows, dim))
        return cls(path, metric, vectors)

    @property
    def num_rows(self) -> int:
        return int(self.vectors.shape[0])

    @property
    def dim(self) -> int:
        return int(self.vectors.shape[1])

    def tiles(self, tile_rows: int, start: int = 0, end: int | None = None) -> Iterator[Vectors]:
        """Yield aligned copies of the rows [start, end) in order, at most `tile_rows` at a time."""
        end = self.num_rows if end is None else end
        for first in range(start, end, tile_rows):
            yield np.array(self.vectors[first : min(first + tile_rows, end)])

    def rows(self, rows: npt.NDArray[np.int64]) -> Vectors:
        """Return a copy of the vectors of `rows`, of shape rows.shape + (dim,)."""
        return np.asarray(self.vectors[rows.reshape(-1)]).reshape(*rows.shape, self.dim)


def check_finite(path: Path, first_row: int, vectors: npt.NDArray[Any]) -> None:
    """Raise IndexMismatch, which names the row, if one of the `vectors` of `path` is not finite."""
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise IndexMismatch(
            f"{path} row {first_row + bad[0]} (from 0): got a vector that is not finite, expected "
            "numbers; fix: encode the corpus again, in float32 if the model overflows float16"
        )


def read_shape(path: Path) -> tuple[int, int, str]:
    """Return rows, dim and metric of a Flat index, read from its header; raises SetupError."""
    if not path.is_file():
        raise SetupError(f"index {path} does not exist; expected a FAISS index: set --index_path")
    header = _read_header(path)
    kind, expected = header[:4], HEADER.size
    if kind not in KINDS:
        raise SetupError(_wrong_kind(path, header))
    if len(header) == HEADER.size:
        _, dim, num_rows, _, _, _, metric, count = HEADER.unpack(header)
        if metric not in METRICS or KINDS[kind] not in (None, metric):
            raise SetupError(
                f"{path} is a Flat index of FAISS metric {metric}; expected inner product (0) or "
                "L2 (1), with either --dense_engine: build it again with index_builder"
            )
        if dim < 1 or num_rows < 0 or count != dim * num_rows:
            raise SetupError(
                f"the header of {path} has {num_rows} rows of {dim} values, but {count} values; "
                "expected a file that faiss.write_index wrote: build or download it again"
            )
        expected += 4 * count
    if (size := path.stat().st_size) != expected:
        raise SetupError(
            f"{path} has {size} bytes, but its header promises {expected}; expected a complete "
            "index: download it again, or join all of its parts in order"
        )
    return num_rows, dim, METRICS[metric]


def is_flat(path: Path) -> bool:
    """Return whether the file is a FAISS Flat index, by its first bytes."""
    return _read_header(path)[:4] in KINDS


def _read_header(path: Path) -> bytes:
    try:
        with regular_file(path).open("rb") as file:
            return file.read(HEADER.size)
    except OSError as error:
        raise SetupError(
            f"index {path} cannot be read ({error}); expected a FAISS index: set --index_path"
        ) from error


def _wrong_kind(path: Path, header: bytes) -> str:
    if header[:1] != b"I":
        return (
            f"{path} begins with {header[:4]!r}, which no FAISS index does; expected a Flat index "
            "(IxFI, IxF2): give the right --index_path, or download the file again"
        )
    return (
        f"{path} is a FAISS index of kind {header[:4].decode(errors='replace')!r}; the torch "
        "engine expects a Flat index (IxFI, IxF2): build one with --faiss_type Flat, or use "
        "--dense_engine faiss, which searches most kinds of float vectors"
    )
