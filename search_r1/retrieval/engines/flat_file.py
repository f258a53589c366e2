"""Memory-mapped access to the rows of a FAISS Flat index file."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from search_r1.retrieval.errors import IndexMismatch, SetupError
from verl.files import regular_file

Vectors = npt.NDArray[np.float32]

METRICS = {faiss.METRIC_INNER_PRODUCT: "ip", faiss.METRIC_L2: "l2"}
SIGNATURE = re.compile(r"^Error in .* at \S+:\d+: (?:Error: )?", re.DOTALL)
"""The beginning of FAISS's messages: function with its C++ types, file and line."""


def reason_of(error: Exception) -> str:
    """Return FAISS's message in one short line."""
    text = SIGNATURE.sub("", str(error)) or type(error).__name__
    return textwrap.shorten(text, 200)


def read_index(path: Path) -> Any:
    """Memory-map a FAISS index of any kind; raises SetupError if FAISS cannot read it."""
    try:
        index = faiss.read_index(str(regular_file(path)), faiss.IO_FLAG_MMAP_IFC)
    except (RuntimeError, MemoryError, OSError) as error:
        raise SetupError(
            f"index {path} cannot be read by FAISS ({reason_of(error)}); expected a complete index "
            "file: set --index_path, or build or download it again"
        ) from error
    if index.metric_type not in METRICS:
        raise SetupError(
            f"{path} has FAISS metric {index.metric_type}; expected inner product (0) or L2 (1): "
            "build it again with index_builder"
        )
    return index


@dataclass(frozen=True)
class FlatFile:
    """Rows and metric of a Flat index file."""

    path: Path
    metric: str
    """`inner_product`, or `l2` (squared distance: lower fits better)."""
    vectors: Vectors
    """(num_rows, dim), a memory map of the file that is not aligned."""
    index: Any
    """FAISS's index, which owns the map."""

    @classmethod
    def open(cls, path: Path) -> "FlatFile":
        """Map the file; raises SetupError if it cannot be read, or is not a Flat index."""
        index = read_index(path)
        if not isinstance(index, faiss.IndexFlat):
            raise SetupError(
                f"{path} is a FAISS index of kind {type(index).__name__}; the torch engine expects "
                "a Flat index: build one with --faiss_type Flat, or use --dense_engine faiss, "
                "which searches most kinds of float vectors"
            )
        vectors = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d)
        metric = "l2" if index.metric_type == faiss.METRIC_L2 else "inner_product"
        return cls(path, metric, vectors.reshape(index.ntotal, index.d), index)

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
