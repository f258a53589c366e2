"""Dense search with FAISS: opens an index file of any kind, on CPU or on GPUs.

Scores are inner products, or negative squared distances if the index was made for L2. A damaged
file can end the process that reads it; --verify finds that before, by the manifest's hashes.
"""

import logging
import math
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt

from search_r1.retrieval.corpus import Corpus, Mask
from search_r1.retrieval.encoder import Encoder
from search_r1.retrieval.encoders.families import Vectors
from search_r1.retrieval.engines.base import Ranking, Retriever
from search_r1.retrieval.engines.dense import open_dense
from search_r1.retrieval.engines.filtered import drop
from search_r1.retrieval.engines.flat_file import METRICS, read_index, reason_of
from search_r1.retrieval.errors import IndexMismatch, SetupError, install_command
from search_r1.retrieval.settings import FaissConfig, RetrieverConfig

logger = logging.getLogger(__name__)

Rows = npt.NDArray[np.int64]
BLAS_QUERIES = 4
"""Minimum number of queries for which a Flat index multiplies matrices. FAISS 1.15 defaults to
128,000 and computes one pair of vectors at a time below that: with a million vectors, 64 queries
took 7 times as long."""
LARGE_SHARE, SPARE = 0.1, 3
"""From this share of allowed rows on, a search of all rows by matrix products is faster than one of
these rows alone; it looks at this many times as many rows as hold k allowed ones on average."""
MARGIN = 32
"""Candidates beyond k of a Flat index whose scores are computed again in float64."""
NO_HIT = -1
"""Id by which FAISS pads the results of a query with fewer hits; no other id is negative."""
RESCORE_QUERIES = 64
"""Queries whose candidates are scored again at a time, which bounds the memory."""


class FaissIndex:
    """A FAISS index; its results do not depend on how queries are batched."""

    def __init__(self, index: Any, config: FaissConfig, path: Path) -> None:
        """Apply the search parameters; raises SetupError for one that the index does not have.

        `path`: the file of the index, for messages.
        """
        self._path = path
        _set_parameter(index, "nprobe", "nprobe", config.nprobe)
        _set_parameter(index, "ef_search", "efSearch", config.ef_search)
        self.num_rows, self.dim = int(index.ntotal), int(index.d)
        self.metric = METRICS[index.metric_type]
        self._facts = {
            "engine": "faiss",
            "kind": type(index).__name__,
            "dim": self.dim,
            "metric": self.metric,
            "gpu": config.faiss_gpu,
            **_search_parameters(index),
        }
        self._is_exact = isinstance(index, faiss.IndexFlat) and not config.faiss_gpu
        faiss.cvar.distance_compute_blas_threshold = BLAS_QUERIES
        self._index, self._use_gpus = index, config.faiss_gpu

    @classmethod
    def open(cls, path: Path, config: FaissConfig) -> "FaissIndex":
        """Memory-map the file; raises SetupError if FAISS cannot read it, or not search it here."""
        return cls(read_index(path), config, path)

    def load(self, corpus: Corpus, encoder: Encoder) -> None:
        """Move the index to the GPUs if configured; raises SetupError if there are none."""
        if self._use_gpus:
            self._index = _to_gpus(self._index)

    def info(self) -> dict[str, Any]:
        return self._facts

    def search(self, queries: Vectors, k: int, allowed: Mask | None = None) -> Ranking:
        """Return scores and rows; raises SetupError, or IndexMismatch for hits that cannot be."""
        if allowed is not None and self._is_exact and len(queries) >= BLAS_QUERIES:
            share = float(allowed.mean())
            if share >= LARGE_SHARE:
                return self._search_and_drop(queries, k, allowed, math.ceil(SPARE * k / share))
        return self._search(queries, k, allowed)

    def _search_and_drop(self, queries: Vectors, k: int, allowed: Mask, depth: int) -> Ranking:
        """Rank `depth` of all rows, and drop those that are not allowed, where k are left."""
        scores, rows = drop(self._search(queries, depth, None), allowed, k)
        if short := [i for i, hits in enumerate(rows) if len(hits) < k]:
            others = zip(short, *self._search(queries[short], k, allowed), strict=True)
            for i, other_scores, other_rows in others:
                scores[i], rows[i] = other_scores, other_rows
        return scores, rows

    def _search(self, queries: Vectors, k: int, allowed: Mask | None) -> Ranking:
        num_candidates = min(k + MARGIN if self._is_exact else k, self.num_rows)
        try:
            limits = {} if allowed is None else {"params": selecting(self._index, allowed)}
            scores, rows = self._index.search(queries, num_candidates, **limits)
        except (RuntimeError, MemoryError) as error:
            raise SetupError(
                f"{self._path} cannot be searched by FAISS ({reason_of(error)}); expected an index "
                "of a kind that searches alone, such as Flat, HNSW or IVF: build it again"
                f"{'' if allowed is None else ', or leave the filter out'}"
            ) from error
        if len(wrong := rows[(rows < NO_HIT) | (rows >= self.num_rows)]):
            raise IndexMismatch(
                f"{self._path}: got the id {wrong[0]} of {self.num_rows} rows, expected the row "
                "numbers of the corpus; fix: add the vectors in its order, without ids"
            )
        if self._is_exact:
            scores = self._exact_scores(queries, rows)
        elif self.metric == "l2":
            scores = -scores
        if len(bad := rows[(rows >= 0) & ~np.isfinite(scores)]):
            raise IndexMismatch(
                f"{self._path} row {bad[0]} (from 0): got a score that is not finite, expected "
                "numbers; fix: encode the corpus again"
            )
        ranked = [_rank(*pair, k) for pair in zip(scores, rows, strict=True)]
        return [s for s, _ in ranked], [r for _, r in ranked]

    def _exact_scores(self, queries: Vectors, rows: Rows) -> Vectors:
        """Return scores (num_queries, n) of candidate rows, summed in float64.

        FAISS sums in an order that depends on the batch, so equal vectors could differ in score.
        """
        scores = np.empty(rows.shape, dtype=np.float32)
        for start in range(0, len(queries), RESCORE_QUERIES):
            block = slice(start, start + RESCORE_QUERIES)
            found = np.maximum(rows[block], 0).ravel()  # `_rank` drops `NO_HIT`
            vectors = self._index.reconstruct_batch(found).astype(np.float64)
            vectors = vectors.reshape(*rows[block].shape, self.dim)
            query = queries[block].astype(np.float64)[:, None]
            terms = query * vectors if self.metric == "ip" else -np.square(query - vectors)
            scores[block] = terms.sum(axis=2)
        return scores


def _rank(scores: Vectors, rows: Rows, k: int) -> tuple[list[float], list[int]]:
    """Return the best `k` of one query, ties by row; `NO_HIT` is left out."""
    scores, rows = scores[rows >= 0], rows[rows >= 0]
    order = np.lexsort((rows, -scores))[:k]
    return scores[order].tolist(), rows[order].tolist()


def selecting(index: Any, allowed: Mask) -> Any:
    """Return the parameters of a search of `allowed` rows (num_rows,), with the index's own."""
    library: Any = faiss  # whose Python constructors its types do not know
    selector = library.IDSelectorBitmap(np.packbits(allowed, bitorder="little"))
    if isinstance(index, faiss.IndexPreTransform):
        inner = selecting(faiss.downcast_index(index.index), allowed)
        return library.SearchParametersPreTransform(index_params=inner)
    if isinstance(index, faiss.IndexIVF):
        return library.SearchParametersIVF(sel=selector, nprobe=index.nprobe)
    if isinstance(index, faiss.IndexHNSW):
        return library.SearchParametersHNSW(sel=selector, efSearch=index.hnsw.efSearch)
    return library.SearchParameters(sel=selector)


def _set_parameter(index: Any, flag: str, parameter: str, value: int | None) -> None:
    """Set a search parameter; raises SetupError if the index has no such parameter."""
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


def _search_parameters(index: Any) -> dict[str, int]:
    """Return nlist and nprobe of an IVF index, and ef_search of an HNSW graph."""
    inverted = faiss.try_extract_index_ivf(index)
    if inverted is None:
        return {"ef_search": int(index.hnsw.efSearch)} if hasattr(index, "hnsw") else {}
    if inverted.nprobe == 1:
        logger.warning(
            "searching 1 of %d lists per query, FAISS's default: a larger --nprobe, for example "
            "%d, finds more",
            inverted.nlist,
            min(64, inverted.nlist),
        )
    quantizer = faiss.downcast_index(inverted.quantizer)
    parameters = {"nlist": int(inverted.nlist), "nprobe": int(inverted.nprobe)}
    if hasattr(quantizer, "hnsw"):
        parameters["ef_search"] = int(quantizer.hnsw.efSearch)
    return parameters


def check_gpu(verb: str) -> int:
    """Return the number of GPUs that FAISS sees, to `verb` on; raises SetupError if none."""
    num_gpus = faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0
    if num_gpus == 0:
        other = "use --dense_engine torch, which needs neither, " if verb == "search" else ""
        raise SetupError(
            "--faiss_gpu, but this FAISS sees no GPU; expected a GPU build and a visible GPU: "
            f"in an environment of its own {install_command('dense-gpu')}, {other}"
            f"or leave --faiss_gpu out to {verb} on CPU"
        )
    return int(num_gpus)


def _to_gpus(index: Any) -> Any:
    """Return the index in float16, sharded over all GPUs; raises SetupError if there are none."""
    num_gpus = check_gpu("search")
    options = faiss.GpuMultipleClonerOptions()
    options.useFloat16 = True
    options.shard = True
    logger.info("moving the index to %d GPUs in float16", num_gpus)
    try:
        return faiss.index_cpu_to_all_gpus(index, co=options)
    except RuntimeError as error:
        raise SetupError(
            f"--faiss_gpu cannot move this {type(index).__name__} to GPUs ({reason_of(error)}); "
            "expected enough GPU memory, and a kind of index that FAISS supports on GPUs (Flat, "
            "IVF with Flat, SQ or PQ): leave --faiss_gpu out"
        ) from error


def open_retriever(config: RetrieverConfig) -> Retriever:
    return open_dense(config, lambda file: FaissIndex.open(file, config.faiss))
