"""Checks of a FAISS file before it is served: its ids, its vectors, and that it can be searched.

Row i of an index must be document i of the corpus, wherever the index keeps its ids. A damaged file
can end the process that reads it; --verify finds that before, by the manifest's hashes.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from search_r1.retrieval.corpus import sample_indices
from search_r1.retrieval.engines.flat_file import check_finite
from search_r1.retrieval.errors import IndexMismatch, SetupError

Rows = npt.NDArray[np.int64]
EXPECTED_IDS = (
    "expected the row numbers of the corpus, from 0 on, each once; fix: add the vectors in the "
    "order of the corpus, without ids"
)
SIGNATURE = re.compile(r"^Error in .* at \S+:\d+: (?:Error: )?", re.DOTALL)
"""The beginning of FAISS's messages: function with its C++ types, file and line."""


def reason_of(error: Exception) -> str:
    """Return FAISS's message in one short line."""
    text = SIGNATURE.sub("", str(error)) or type(error).__name__
    return textwrap.shorten(text, 200)


def read_index(path: Path) -> Any:
    """Memory-map the file; raises SetupError if FAISS cannot read it."""
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except (RuntimeError, MemoryError) as error:
        raise SetupError(
            f"{path} cannot be read by FAISS ({reason_of(error)}); expected a complete index "
            "file: build or download it again"
        ) from error


def search_index(path: Path, index: Any, queries: Any, k: int) -> tuple[Any, Any]:
    """Return scores and rows (num_queries, k); raises SetupError if FAISS cannot search it."""
    try:
        scores, rows = index.search(queries, k)
    except (RuntimeError, MemoryError) as error:
        raise SetupError(
            f"{path} cannot be searched by FAISS ({reason_of(error)}); expected an index of a "
            "kind that searches alone, such as Flat, HNSW or IVF: build it again"
        ) from error
    return scores, rows


def check_rows(path: Path, index: Any, whole: bool) -> None:
    """Raise IndexMismatch for invalid ids or vectors; of vectors, checks samples unless `whole`."""
    count = int(index.ntotal)
    for ids in _id_maps(index):
        _check_ids(path, ids, count)
    for leaf in _leaves(index):
        inverted: Any = faiss.try_extract_index_ivf(leaf)
        if inverted is None:
            _check_vectors(path, leaf, sample_indices(int(leaf.ntotal), whole=whole))
        else:
            _check_ids(path, _listed_ids(inverted), int(inverted.ntotal))
            _check_count(path, inverted)
            _check_lists(path, inverted, whole)


def _inner(index: Any) -> list[Any]:
    """Return the indexes that this one wraps: behind ids or a transform, or refined by another."""
    wrapped = (getattr(index, name, None) for name in ("index", "base_index", "refine_index"))
    return [faiss.downcast_index(inner) for inner in wrapped if isinstance(inner, faiss.Index)]


def _leaves(index: Any) -> Iterator[Any]:
    """Yield the indexes that hold vectors, without those around them."""
    inner = _inner(index)
    if not inner:
        yield index
    for part in inner:
        yield from _leaves(part)


def _id_maps(index: Any) -> Iterator[Rows]:
    """Yield the ids that the index, or one inside of it, maps its rows to."""
    if hasattr(index, "id_map"):
        yield faiss.vector_to_array(index.id_map)
    for part in _inner(index):
        yield from _id_maps(part)


def _listed_ids(inverted: Any) -> Rows:
    """Return the ids in the lists of an IVF index."""
    lists = inverted.invlists
    parts = [np.empty(0, dtype=np.int64)]
    for list_id in range(inverted.nlist):
        if size := lists.list_size(list_id):
            parts.append(faiss.rev_swig_ptr(lists.get_ids(list_id), size).copy())
    return np.concatenate(parts)


def _check_ids(path: Path, ids: Rows, count: int) -> None:
    """Raise IndexMismatch for an id outside of the rows, and for the first that is repeated."""
    if ((ids < 0) | (ids >= count)).any():
        raise IndexMismatch(f"{path}: got ids outside of its {count} rows, {EXPECTED_IDS}")
    repeated = np.flatnonzero(np.bincount(ids, minlength=count) > 1)
    if len(repeated):
        raise IndexMismatch(
            f"{path}: got the id {repeated[0]} repeatedly, {len(repeated)} ids in all, "
            f"{EXPECTED_IDS}"
        )


def _check_count(path: Path, inverted: Any) -> None:
    """Raise IndexMismatch if the lists lack vectors; FlatDedup keeps equal ones elsewhere."""
    num_listed = inverted.invlists.compute_ntotal()
    keeps_copies = type(faiss.downcast_index(inverted)).__name__ == "IndexIVFFlatDedup"
    if num_listed != inverted.ntotal and not keeps_copies:
        raise IndexMismatch(
            f"{path}: got {num_listed} of {inverted.ntotal} vectors in its lists, expected all: "
            "FAISS drops vectors that are not finite; fix: encode the corpus again"
        )


def _check_lists(path: Path, inverted: Any, whole: bool) -> None:
    """Raise IndexMismatch for an invalid vector in a sample of the lists of an IVF index.

    Codes of fast-scan indexes are packed across vectors: FAISS would read a single one from memory
    that is not its own, so they are not checked.
    """
    if isinstance(faiss.downcast_index(inverted), faiss.IndexIVFFastScan):
        return
    lists = inverted.invlists
    vector = np.empty(inverted.d, dtype=np.float32)
    for list_id in sample_indices(inverted.nlist, whole=whole):
        for offset in sample_indices(lists.list_size(list_id), whole=whole):
            try:
                inverted.reconstruct_from_offset(list_id, offset, faiss.swig_ptr(vector))
            except RuntimeError:  # this kind of index keeps nothing that a vector is read from
                return
            check_finite(path, int(lists.get_single_id(list_id, offset)), vector[None])


def _check_vectors(path: Path, index: Any, rows: Iterable[int]) -> None:
    """Raise IndexMismatch for a vector that is not finite, if vectors can be read."""
    for row in rows:
        try:
            vector = index.reconstruct(row)
        except RuntimeError:  # hashes, for example
            return
        check_finite(path, row, vector[None])
