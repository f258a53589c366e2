"""Index files of any kind that FAISS writes are searched as FAISS does, or refused in one line."""

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from search_r1.retrieval.engines.faiss_index import FaissIndex, reason_of
from search_r1.retrieval.errors import IndexMismatch
from search_r1.retrieval.settings import FaissConfig

DIM, ROWS = 16, 400
KINDS = (
    "Flat", "SQ8", "SQfp16", "SQ4", "PQ4x4", "PQ4x4fs", "RQ4x4", "RQ4x4fs", "LSQ4x4", "RaBitQ",
    "RaBitQfs", "HNSW8,Flat", "HNSW8,SQ8", "NSG8,Flat", "IDMap,Flat", "IDMap2,Flat",
    "IVF4,Flat", "IVF4,FlatDedup", "IVF4,SQ8", "IVF4,PQ4x4", "IVF4,PQ4x4fs", "IVF4,PQ4x4fsr",
    "IVF4,RQ4x4fs", "IVF4,PQ4x4fs,RFlat", "OPQ4,IVF4,PQ4x4fs", "IVF4_HNSW8,PQ4x4fs",
    "IVF4,RaBitQfs", "PCA8,IVF4,Flat", "ITQ8,LSH", "ITQ,LSH", "LSH", "L2norm,Flat",
    "IMI2x2,Flat", "IMI2x2,SQfp16", "IMI2x2,PQ4x4",
)  # fmt: skip


def vectors(seed: int = 0, rows: int = ROWS) -> Any:
    return np.random.default_rng(seed).normal(size=(rows, DIM)).astype(np.float32)


def written(path: Path, kind: str, metric: int = faiss.METRIC_INNER_PRODUCT) -> Any:
    """Write an index of `vectors()` to a file; returns FAISS's own reading of it."""
    if "LSH" in kind or "IMI" in kind:
        metric = faiss.METRIC_L2
    index = faiss.index_factory(DIM, kind, metric)
    index.train(vectors())
    if kind.startswith("IDMap"):
        index.add_with_ids(vectors(), np.arange(ROWS, dtype=np.int64))
    else:
        index.add(vectors())
    faiss.write_index(index, str(path))
    return faiss.read_index(str(path))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_index_is_searched_as_faiss_does(kind: str, tmp_path: Path) -> None:
    """Also those whose codes are packed or from which no vector can be read; none ends the process.

    Scores are compared, since rows of equal scores may be in any order.
    """
    own = written(tmp_path / "index", kind)
    index = FaissIndex.open(tmp_path / "index", FaissConfig())
    queries = vectors(seed=1, rows=5)
    scores, rows = index.search(queries, 4)
    expected, _ = own.search(queries, 4)
    sign = -1 if index.metric == "l2" else 1
    for ours, found, theirs in zip(scores, rows, expected, strict=True):
        assert len(set(found)) == len(ours) > 0
        np.testing.assert_allclose(ours, sign * theirs[: len(ours)], rtol=1e-4, atol=1e-5)


def test_a_score_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    """Infinite values of an index from elsewhere are found when they are hits."""
    stored = vectors()
    stored[7] = np.inf
    index = faiss.index_factory(DIM, "SQfp16", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors())
    index.add(stored)
    opened = FaissIndex(index, FaissConfig(), tmp_path / "index")
    with pytest.raises(IndexMismatch, match="row 7 "):
        opened.search(np.ones((1, DIM), dtype=np.float32), 3)


def test_a_negative_id_is_an_error(tmp_path: Path) -> None:
    """Only -1 means that there is no further hit; the error names the id."""
    index = faiss.index_factory(DIM, "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(vectors())
    index.add_with_ids(vectors(), np.arange(ROWS, dtype=np.int64) - 7)
    opened = FaissIndex(index, FaissConfig(), tmp_path / "index")
    with pytest.raises(IndexMismatch, match=r"the id -[2-7] of"):
        opened.search(vectors(), ROWS)


@pytest.mark.parametrize("kind", ["IVF4,Flat", "IDMap,HNSW8,Flat"])
def test_an_id_that_is_no_row_is_an_error(kind: str, tmp_path: Path) -> None:
    """Ids that an index keeps must be the row numbers of the corpus."""
    index = faiss.index_factory(DIM, kind, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors())
    index.add_with_ids(vectors(), np.arange(ROWS, dtype=np.int64) + 1)
    opened = FaissIndex(index, FaissConfig(), tmp_path / "index")
    assert opened.search(vectors()[:1], 1)[1] == [[1]]
    with pytest.raises(IndexMismatch):
        opened.search(vectors(), ROWS)


def test_messages_of_faiss_lose_their_signatures(tmp_path: Path) -> None:
    """What remains is the reason, in one short line."""
    (tmp_path / "none").write_bytes(b"no index of FAISS")
    with pytest.raises(RuntimeError) as read:
        faiss.read_index(str(tmp_path / "none"))
    with pytest.raises(RuntimeError) as made:
        faiss.index_factory(8, "IMI2x2,Flat", faiss.METRIC_INNER_PRODUCT)
    for error in (read.value, made.value, RuntimeError("a\nb " * 300), MemoryError()):
        reason = reason_of(error)
        assert reason and len(reason) <= 200
        assert not [part for part in ("\n", "std::", ".cpp") if part in reason]


def test_a_vector_that_is_not_a_number_is_no_hit(tmp_path: Path) -> None:
    """FAISS fills the places of vectors that it cannot compare with row -1, which is no row."""
    stored = vectors()
    stored[7] = np.nan
    index = faiss.IndexFlatIP(DIM)
    index.add(stored)
    scores, rows = FaissIndex(index, FaissConfig(), tmp_path / "index").search(vectors()[:3], ROWS)
    assert all(sorted(found) == [r for r in range(ROWS) if r != 7] for found in rows)
    assert np.isfinite(scores).all()
