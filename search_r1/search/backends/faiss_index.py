"""A FAISS index as a file has it: mapped, tuned, moved to GPUs, searched; any factory string.

Scores are inner products, or the negative squared distances of an index made for L2.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from search_r1.search.backends.base import Retriever
from search_r1.search.backends.dense import open_dense
from search_r1.search.backends.flat_file import FlatFile, check_finite, is_flat
from search_r1.search.checksums import chosen
from search_r1.search.corpus import Corpus
from search_r1.search.encoder import Encoder
from search_r1.search.encoders.families import Vectors
from search_r1.search.errors import IndexMismatch, SetupError
from search_r1.search.settings import FaissConfig, RetrieverConfig

logger = logging.getLogger(__name__)

Rows = npt.NDArray[np.int64]
METRICS = {faiss.METRIC_INNER_PRODUCT: "ip", faiss.METRIC_L2: "l2"}
BLAS_QUERIES = 4
"""Queries from which a Flat index multiplies matrices. FAISS 1.15 waits for 128,000 and goes
through the vectors one pair at a time: at a million vectors, 64 queries took 7 times as long."""
MARGIN = 32
"""Candidates beyond k of an exact index whose scores are summed again."""
QUERIES_AT_ONCE = 64
"""Queries whose candidates are summed again together, which bounds the memory."""


class FaissIndex:
    """Rows of the best vectors; its answers do not depend on which queries came together."""

    def __init__(self, index: Any, config: FaissConfig) -> None:
        """Apply the settings; raises SetupError for one that the index does not have."""
        _tune(index, "nprobe", "nprobe", config.nprobe)
        _tune(index, "ef_search", "efSearch", config.ef_search)
        self.num_rows, self.dim = int(index.ntotal), int(index.d)
        self.metric = METRICS[index.metric_type]
        self._facts = {
            "engine": "faiss",
            "kind": type(index).__name__,
            "dim": self.dim,
            "metric": self.metric,
            "gpu": config.faiss_gpu,
            **_efforts(index),
        }
        self._is_exact = isinstance(index, faiss.IndexFlat) and not config.faiss_gpu
        faiss.cvar.distance_compute_blas_threshold = BLAS_QUERIES
        self._index, self._on_gpus = index, config.faiss_gpu

    @classmethod
    def open(cls, path: Path, config: FaissConfig, *, whole: bool = False) -> "FaissIndex":
        """Map the file; raises SetupError, or IndexMismatch for vectors or ids that cannot be."""
        if is_flat(path):
            FlatFile.open(path).check_finite(whole=whole)
        try:
            index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except (RuntimeError, MemoryError) as error:
            raise SetupError(
                f"{path} cannot be read by FAISS ({error}); expected a complete index file: "
                "build or download it again"
            ) from error
        if index.metric_type not in METRICS:
            raise SetupError(
                f"{path} has FAISS metric {index.metric_type}; expected inner product or L2"
            )
        if not is_flat(path):
            _check_rows(path, index, whole)
        return cls(index, config)

    def load(self, corpus: Corpus, encoder: Encoder) -> None:
        """Move it to the GPUs where the settings say so; raises SetupError without any."""
        if self._on_gpus:
            self._index = _to_gpus(self._index)

    def info(self) -> dict[str, Any]:
        """Backend, kind, dim, metric, and how far a search goes."""
        return self._facts

    def search(self, queries: Vectors, k: int) -> tuple[list[list[float]], list[list[int]]]:
        """Scores and rows of at most `k` vectors per query, best first, ties by row."""
        wanted = min(k + MARGIN if self._is_exact else k, self.num_rows)
        scores, rows = self._index.search(queries, wanted)
        if self._is_exact:
            scores = self._exact_scores(queries, rows)
        elif self.metric == "l2":
            scores = -scores
        ranked = [_ranked(*pair, k) for pair in zip(scores, rows, strict=True)]
        return [s for s, _ in ranked], [r for _, r in ranked]

    def _exact_scores(self, queries: Vectors, rows: Rows) -> Vectors:
        """(num_queries, n) scores summed in float64, so that equal vectors have equal scores.

        FAISS sums in another order for a block of queries than for one, and at a block's edge.
        """
        scores = np.empty(rows.shape, dtype=np.float32)
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            block = slice(start, start + QUERIES_AT_ONCE)
            found = self._index.reconstruct_batch(rows[block].ravel()).astype(np.float64)
            found = found.reshape(*rows[block].shape, self.dim)
            query = queries[block].astype(np.float64)[:, None]
            terms = query * found if self.metric == "ip" else -np.square(query - found)
            scores[block] = terms.sum(axis=2)
        return scores


def _check_rows(path: Path, index: Any, whole: bool) -> None:
    """Raise IndexMismatch for a vector that is not finite, or an id that is no row."""
    count = int(index.ntotal)
    inverted: Any = faiss.try_extract_index_ivf(index)
    ids: list[Any] = [faiss.vector_to_array(index.id_map)] if hasattr(index, "id_map") else []
    if inverted is not None:
        lists, size = inverted.invlists, inverted.invlists.list_size
        vector = np.empty(inverted.d, dtype=np.float32)
        for number in (i for i in _places(inverted.nlist, whole) if size(i)):
            ids.append(faiss.rev_swig_ptr(lists.get_ids(number), size(number)))
            for offset in _places(size(number), whole):
                inverted.reconstruct_from_offset(number, offset, faiss.swig_ptr(vector))
                check_finite(path, int(ids[-1][offset]), vector[None])
    elif not ids:
        for row in _places(count, whole):
            check_finite(path, row, index.reconstruct(row)[None])
    if any(((found < 0) | (found >= count)).any() for found in ids):
        raise IndexMismatch(
            f"{path}: got ids that are no row of {count}, expected the numbers of the corpus's "
            "rows from 0 on; fix: add the vectors in the order of the corpus, without ids"
        )
    if inverted is not None and (kept := inverted.invlists.compute_ntotal()) != count:
        raise IndexMismatch(
            f"{path}: got {kept} of {count} vectors in its lists, expected all: FAISS leaves out "
            "those that are not finite; fix: encode the corpus again"
        )


def _places(count: int, whole: bool) -> Sequence[int]:
    return range(count) if whole else chosen(count)


def _ranked(scores: Vectors, rows: Rows, k: int) -> tuple[list[float], list[int]]:
    """The best `k`, ties by row; FAISS pads with row -1 what an approximate search lacks."""
    scores, rows = scores[rows >= 0], rows[rows >= 0]
    order = np.lexsort((rows, -scores))[:k]
    return scores[order].tolist(), rows[order].tolist()


def _tune(index: Any, flag: str, parameter: str, value: int | None) -> None:
    """Set a parameter of the search; raises SetupError if the index has none of this name."""
    if value is None:
        return
    try:
        faiss.ParameterSpace().set_index_parameter(index, parameter, value)
    except RuntimeError as error:
        kinds = {"nprobe": "an IVF index", "ef_search": "an HNSW index"}
        raise SetupError(
            f"--{flag} {value}, but the index is {type(index).__name__}, which has no such "
            f"parameter; expected {kinds[flag]}: leave the option out"
        ) from error


def _efforts(index: Any) -> dict[str, int]:
    """How much of the index a search looks at: nprobe of IVF, ef_search of HNSW."""
    inverted = faiss.try_extract_index_ivf(index)
    if inverted is None:
        return {"ef_search": int(index.hnsw.efSearch)} if hasattr(index, "hnsw") else {}
    if inverted.nprobe == 1:
        logger.warning(
            "searching 1 of %d lists per query, FAISS's default: a larger --nprobe, for example "
            "%d, finds more",
            *(inverted.nlist, min(64, inverted.nlist)),
        )
    quantizer = faiss.downcast_index(inverted.quantizer)
    lists = {"nlist": int(inverted.nlist), "nprobe": int(inverted.nprobe)}
    return lists | (
        {"ef_search": int(quantizer.hnsw.efSearch)} if hasattr(quantizer, "hnsw") else {}
    )


def check_gpu(verb: str) -> int:
    """The GPUs that FAISS sees; raises SetupError, which says to `verb` on CPU, without any."""
    num_gpus = faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0
    if num_gpus == 0:
        other = "search by --dense_engine torch, which needs neither, " if verb == "search" else ""
        raise SetupError(
            "--faiss_gpu, but this FAISS sees no GPU; expected a GPU build (faiss-gpu) and a "
            f"visible GPU: install it, {other}or leave --faiss_gpu out to {verb} on CPU"
        )
    return int(num_gpus)


def _to_gpus(index: Any) -> Any:
    """The index in half precision, sharded over all GPUs; raises SetupError without one."""
    num_gpus = check_gpu("search")
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = True
    options.shard = True
    logger.info("moving the index to %d GPUs in float16", num_gpus)
    try:
        return faiss.index_cpu_to_all_gpus(index, co=options)
    except RuntimeError as error:
        raise SetupError(
            f"--faiss_gpu cannot take this {type(index).__name__} ({error}); expected room, and a "
            "kind that FAISS has on GPUs (Flat, IVF with Flat, SQ or PQ): leave --faiss_gpu out"
        ) from error


def open_retriever(config: RetrieverConfig) -> Retriever:
    """The FAISS index and the encoder that the settings name."""

    def open_index(file: Path) -> FaissIndex:
        return FaissIndex.open(file, config.faiss, whole=config.verify)

    return open_dense(config, open_index)
