"""Embeddings to a FAISS index of any factory string, by inner product."""

import logging
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from search_r1.search.errors import SetupError
from search_r1.search.index.embeddings import Matrix, blocks
from search_r1.search.index.progress import progress

logger = logging.getLogger(__name__)

MADE_WITH = f"faiss {faiss.__version__}"
MIN_POINTS, MAX_POINTS = 39, 256
"""Training vectors per centroid: below the first FAISS warns, beyond the second it samples."""
SCALAR_POINTS = 65536
"""Training vectors of a scalar quantizer, which only learns ranges."""
SEED = 1234


def check_factory(factory: str, dim: int, count: int) -> None:
    """Raise SetupError unless FAISS makes `factory` for `dim` and `count` vectors can train it."""
    try:
        _make(factory, dim)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise SetupError(
            f"--faiss_type {factory} cannot be made for {dim} dimensions ({reason}); expected a "
            "FAISS factory such as Flat, HNSW64, SQ8, IVF4096,Flat or IVF4096,PQ64, where the "
            "number after PQ divides the dimensions"
        ) from error
    least = MIN_POINTS * num_centroids(factory)
    if count < least:
        raise SetupError(
            f"--faiss_type {factory} needs {least} documents to train its "
            f"{num_centroids(factory)} centroids, but the corpus has {count}; expected a factory "
            f"for a smaller corpus: Flat, SQ8, or at most {count // MIN_POINTS} lists in IVF"
        )


def num_centroids(factory: str) -> int:
    """The largest number of centroids that a part of `factory` learns; 0 if none does."""
    lists = [int(n) for n in re.findall(r"IVF(\d+)", factory)]
    bits = [int(n or 8) for n in re.findall(r"(?<!O)PQ\d+(?:x(\d+))?", factory)]
    return max(lists + [2**n for n in bits], default=0)


def bytes_per_vector(factory: str, dim: int) -> int:
    """About what one vector takes in the index, in bytes."""
    links = [int(n) for n in re.findall(r"HNSW(\d+)", factory) if "IVF" not in factory]
    if links:
        codes = dim if "SQ8" in factory else 4 * dim
        return codes + 4 * (2 * links[0] + links[0] // 8) + 20
    return int(_make(factory, dim).sa_code_size()) + (8 if "IVF" in factory else 0)


def check_gpu() -> None:
    """Raise SetupError if this FAISS sees no GPU to train on."""
    if (faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0) == 0:
        raise SetupError(
            "--faiss_gpu, but this FAISS sees no GPU; expected a GPU build (faiss-gpu) and a "
            "visible GPU: install it, or leave --faiss_gpu out to train on CPU"
        )


def build_faiss(matrix: Matrix, factory: str, path: Path, *, on_gpu: bool = False) -> None:
    """Write the index of all rows of `matrix` (num_documents, dim) to `path`."""
    if factory == "Flat":
        _write_flat(matrix, path)
        return
    index = _make(factory, matrix.shape[1])
    if not index.is_trained:
        _train(index, factory, matrix, on_gpu)
    for vectors in _watched(matrix, f"add to {factory}"):
        index.add(vectors)
    faiss.write_index(index, str(path))


def training_sample(matrix: Matrix, factory: str) -> npt.NDArray[np.float32]:
    """The seeded sample of rows that trains `factory`, in row order."""
    wanted = min(len(matrix), MAX_POINTS * num_centroids(factory) or SCALAR_POINTS)
    rows = np.random.default_rng(SEED).choice(len(matrix), wanted, replace=False)
    sample = np.ascontiguousarray(matrix[np.sort(rows)], dtype=np.float32)
    if not np.isfinite(sample).all():
        for _ in blocks(matrix):  # names the row
            pass
    return sample


def _make(factory: str, dim: int) -> Any:
    return faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)


def _train(index: Any, factory: str, matrix: Matrix, on_gpu: bool) -> None:
    sample = training_sample(matrix, factory)
    logger.info("training %s on %d of %d vectors", factory, len(sample), len(matrix))
    inverted = faiss.try_extract_index_ivf(index)
    if on_gpu and inverted is not None:
        flat = faiss.IndexFlatIP(inverted.d)
        inverted.clustering_index = faiss.index_cpu_to_all_gpus(flat)
    index.train(sample)


def _write_flat(matrix: Matrix, path: Path) -> None:
    """An exact index, written as a stream: what FAISS writes, without the matrix in memory.

    An empty index ends with the number of its values, 0; its count of rows is 8 bytes from the
    9th on, after the kind (4 bytes) and the dimensions (4 bytes).
    """
    empty = faiss.serialize_index(faiss.IndexFlatIP(matrix.shape[1])).tobytes()
    assert empty[8:16] == bytes(8), "FAISS writes Flat indexes otherwise than expected"
    assert empty[-8:] == bytes(8), "FAISS writes Flat indexes otherwise than expected"
    rows, values = struct.pack("<q", len(matrix)), struct.pack("<Q", matrix.size)
    with path.open("wb") as file:
        file.write(empty[:8] + rows + empty[16:-8] + values)
        for vectors in _watched(matrix, "write Flat"):
            file.write(memoryview(vectors.data).cast("B"))


def _watched(matrix: Matrix, what: str) -> Iterator[npt.NDArray[np.float32]]:
    """The rows block by block, with progress."""
    done = 0
    with progress(what, "vectors", len(matrix)) as report:
        for vectors in blocks(matrix):
            yield vectors
            done += len(vectors)
            report(done)
