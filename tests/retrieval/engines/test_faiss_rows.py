"""Ids and vectors of a FAISS index, wherever it keeps them, are a corpus's rows or refused."""

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from search_r1.retrieval.engines.faiss_index import FaissIndex
from search_r1.retrieval.errors import IndexMismatch
from search_r1.retrieval.settings import FaissConfig

DIM, ROWS = 16, 400
IDS = np.arange(ROWS, dtype=np.int64)
VECTORS = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)


def open_written(index: Any, path: Path) -> FaissIndex:
    faiss.write_index(index, str(path))
    return FaissIndex.open(path, FaissConfig(), whole=True)


def added_with(ids: Any, kind: str) -> Any:
    """Return an index whose vectors have these ids, behind a PCA in the index itself."""
    index = faiss.index_factory(DIM, kind, faiss.METRIC_INNER_PRODUCT)
    index.train(VECTORS)
    inner = faiss.downcast_index(index.index) if kind.startswith("PCA") else index
    inner.add_with_ids(index.chain.at(0).apply(VECTORS) if inner is not index else VECTORS, ids)
    index.ntotal = ROWS
    return index


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (IDS + 7_000, "ids outside"),
        (IDS - 1, "ids outside"),
        (np.where(IDS == 9, 8, IDS), "the id 8 repeatedly, 1 ids"),
        (IDS // 2, "the id 0 repeatedly, 200 ids"),
    ],
    ids=["beyond", "negative", "one twice", "each twice"],
)
@pytest.mark.parametrize(
    "kind", ["IVF4,PQ4x4fs", "IVF4,Flat", "IVF4,SQ8", "IDMap,Flat", "IDMap,HNSW8,Flat",
             "PCA8,IDMap2,Flat", "PCA8,IVF4,Flat"]
)  # fmt: skip
def test_ids_that_are_no_rows_of_the_corpus_are_refused(
    kind: str, ids: Any, named: str, tmp_path: Path
) -> None:
    """Wherever the index keeps them."""
    with pytest.raises(IndexMismatch, match=f"{named}.*expected the row numbers"):
        open_written(added_with(ids, kind), tmp_path / "index")


@pytest.mark.parametrize(
    "kind", ["IVF4,Flat", "IVF4,PQ4x4fs", "IDMap,Flat", "IDMap,HNSW8,Flat", "PCA8,IDMap2,Flat"]
)
def test_ids_in_any_order_are_rows(kind: str, tmp_path: Path) -> None:
    """Vectors may be added in another order, with the row of each."""
    order = np.random.default_rng(1).permutation(ROWS)
    index = open_written(added_with(order, kind), tmp_path / "index")
    assert index.num_rows == ROWS


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "kind", ["SQfp16", "SQbf16", "HNSW8,Flat", "HNSW8,SQfp16", "NSG8,Flat", "IDMap,Flat",
             "IDMap2,SQfp16", "IDMap,HNSW8,SQfp16", "PCA8,SQfp16", "SQ8,RFlat",
             "Flat,Refine(SQfp16)", "IVF4,Flat", "IVF4_HNSW4,SQfp16", "IVF4,SQ8,RFlat",
             "IMI2x2,SQfp16"]
)  # fmt: skip
def test_vectors_that_are_not_finite_are_refused(kind: str, value: float, tmp_path: Path) -> None:
    """In every kind that keeps them; FAISS leaves them out of lists, where their number shows."""
    metric = faiss.METRIC_L2 if "IMI" in kind else faiss.METRIC_INNER_PRODUCT
    index = faiss.index_factory(DIM, kind, metric)
    index.train(VECTORS)
    vectors = VECTORS.copy()
    vectors[7, 3] = value
    if kind.startswith("IDMap"):
        index.add_with_ids(vectors, IDS)
    else:
        index.add(vectors)
    with pytest.raises(IndexMismatch):
        open_written(index, tmp_path / "index")


def test_copies_that_the_lists_keep_once_are_served(tmp_path: Path) -> None:
    """FlatDedup lists one of several equal vectors, and finds all."""
    index = faiss.index_factory(DIM, "IVF4,FlatDedup", faiss.METRIC_INNER_PRODUCT)
    index.train(VECTORS)
    index.add(np.concatenate([VECTORS, VECTORS[:5]]))
    assert index.invlists.compute_ntotal() == ROWS
    opened = open_written(index, tmp_path / "index")
    assert sorted(opened.search(VECTORS[3:4], 2)[1][0]) == [3, ROWS + 3]
