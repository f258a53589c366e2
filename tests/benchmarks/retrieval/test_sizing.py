"""The extrapolation of index sizes and rates."""

import pytest

from benchmarks.retrieval.sizing import (
    DIM,
    GB,
    ROWS,
    IndexSize,
    extrapolate_rate,
    fitting_sizes,
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


def test_a_fitting_size_includes_the_reserve() -> None:
    """A size fits only if there is memory for the need and the reserve."""
    assert fitting_sizes(22.0, (24, 80), 2.0) == [24, 80]
    assert fitting_sizes(22.1, (24, 80), 2.0) == [80]
    assert fitting_sizes(300.0, (24, 80), 2.0) == []


def test_rates_fall_with_vectors_and_dimension() -> None:
    """A scan of twice the vectors of the same size takes twice the time."""
    assert extrapolate_rate(10.0, ROWS, DIM) == 10.0
    assert extrapolate_rate(10.0, ROWS // 2, DIM) == pytest.approx(5.0)
    assert extrapolate_rate(10.0, ROWS, DIM // 2) == 5.0
