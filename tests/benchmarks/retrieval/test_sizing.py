"""The extrapolation of index sizes and rates."""

import pytest

from benchmarks.retrieval.sizing import (
    DIM,
    GB,
    ROWS,
    IndexSize,
    index_size,
)


def test_bytes_of_wiki18() -> None:
    """float32 takes 64.6 GB, int8 with a scale per vector 16.2 GB."""
    flat = index_size("flat", 1000 * 384 * 4, 1000, 384, 4)
    int8 = index_size("int8", 1000 * (384 + 4), 1000, 384, 1)
    assert flat.bytes_per_vector(DIM) * ROWS / GB == pytest.approx(64.559, abs=1e-3)
    assert int8.bytes_per_vector(DIM) * ROWS / GB == pytest.approx(16.224, abs=1e-3)


def test_overhead_does_not_grow_with_the_dimension() -> None:
    """The measured bytes in addition to the values are the same for another dimension."""
    hnsw = index_size("hnsw", 100 * (384 * 4 + 272), 100, 384, 4)
    assert hnsw == IndexSize("hnsw", 4, 272, 384)
    assert hnsw.bytes_per_vector(768) == 768 * 4 + 272
