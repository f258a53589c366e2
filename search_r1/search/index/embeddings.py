"""Embeddings of a whole corpus as one .npy file that survives a kill: `EmbeddingFile`.

Rows are written in shards. A shard's byte in `done.bin` is set only after its rows are on the
disk, and different processes write different bytes, so several can fill one file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from search_r1.search.backends.flat_file import check_finite
from search_r1.search.errors import SetupError
from verl.files import flush, whole_file

Matrix = npt.NDArray[Any]
"""(num_documents, dim), float32 or float16."""

FILE_NAME = "embeddings.npy"
DONE_NAME = "done.bin"
DTYPES = ("float32", "float16")


class EmbeddingFile:
    """The embeddings of a corpus in a work folder, and which shards of them are done."""

    def __init__(self, folder: Path, shard_rows: int) -> None:
        """Open what `create` made in `folder`."""
        self._folder, self._shard_rows = folder, shard_rows
        self.matrix: np.memmap[Any, Any] = np.load(folder / FILE_NAME, mmap_mode="r+")
        self._done = np.memmap(folder / DONE_NAME, np.bool_, "r+")

    @classmethod
    def create(
        cls, folder: Path, count: int, dim: int, dtype: str, shard_rows: int
    ) -> "EmbeddingFile":
        """The file in `folder`, made (sparse) if it is not there yet."""
        if not ((folder / DONE_NAME).exists() and (folder / FILE_NAME).exists()):
            np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
                folder / FILE_NAME, mode="w+", dtype=np.dtype(dtype), shape=(count, dim)
            ).flush()
            with whole_file(folder / DONE_NAME, is_lasting=True) as part:
                part.write_bytes(bytes(-(-count // shard_rows)))
        return cls(folder, shard_rows)

    def missing(self) -> list[int]:
        """Shards that are not done, in order."""
        shards: list[int] = np.flatnonzero(~self._done).tolist()
        return shards

    def rows(self, shard: int) -> range:
        """The rows of a shard."""
        start = shard * self._shard_rows
        return range(start, min(start + self._shard_rows, len(self.matrix)))

    @property
    def num_done(self) -> int:
        """Rows that are on the disk, by all processes."""
        return sum(len(self.rows(int(shard))) for shard in np.flatnonzero(self._done))

    def write(self, shard: int, vectors: Matrix) -> None:
        """Put a shard's vectors (rows, dim) on the disk, then mark it done."""
        rows = self.rows(shard)
        expected = (len(rows), self.matrix.shape[1])
        assert vectors.shape == expected, f"got {vectors.shape}, expected {expected}"
        check_finite(self._folder / FILE_NAME, rows.start, vectors)
        self.matrix[rows.start : rows.stop] = vectors
        flush(self._folder / FILE_NAME)
        self._done[shard] = True
        flush(self._folder / DONE_NAME)


def open_embeddings(path: Path, count: int, dim: int) -> Matrix:
    """Existing embeddings, .npy or the bare values, by memory map; raises SetupError otherwise."""
    try:
        matrix = _map(path, count, dim)
    except (OSError, ValueError, EOFError) as error:
        raise SetupError(
            f"embeddings {path} cannot be read ({error}); expected a .npy file or bare values: "
            "set --embedding_path"
        ) from error
    if matrix.shape != (count, dim) or matrix.dtype not in DTYPES:
        raise SetupError(
            f"embeddings {path} are {matrix.dtype} of shape {matrix.shape}; expected float32 or "
            f"float16 of shape ({count}, {dim}): the corpus and encoder they were made of"
        )
    return matrix


def blocks(matrix: Matrix, rows: int = 65536) -> Iterator[npt.NDArray[np.float32]]:
    """The matrix from top to bottom, `rows` at a time, as float32; IndexMismatch if not finite."""
    path = Path(getattr(matrix, "filename", None) or FILE_NAME)
    for start in range(0, len(matrix), rows):
        vectors = np.ascontiguousarray(matrix[start : start + rows], dtype=np.float32)
        check_finite(path, start, vectors)
        yield vectors


def _map(path: Path, count: int, dim: int) -> Matrix:
    with path.open("rb") as file:
        is_npy = file.read(6) == b"\x93NUMPY"
    if is_npy:
        matrix: Matrix = np.load(path, mmap_mode="r", allow_pickle=False)
        return matrix
    bytes_per_value, rest = divmod(path.stat().st_size, count * dim)
    if rest or bytes_per_value not in (2, 4):
        raise ValueError(f"{path.stat().st_size} bytes are not {count} x {dim} values")
    return np.memmap(path, np.dtype(f"f{bytes_per_value}"), mode="r", shape=(count, dim))
