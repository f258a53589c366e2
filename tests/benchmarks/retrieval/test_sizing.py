"""The arithmetic of the sizing table."""

import pytest

from benchmarks.retrieval.sizing import DIM, GB, ROWS, Kind, carried_rate, fitting, kind_of


def test_bytes_of_wiki18_by_hand() -> None:
    """float32 takes 64.6 GB, int8 with a scale per vector 16.2 GB."""
    flat = kind_of("flat", 1000 * 384 * 4, 1000, 384, 4)
    int8 = kind_of("int8", 1000 * (384 + 4), 1000, 384, 1)
    assert flat.bytes_per_vector(DIM) * ROWS / GB == pytest.approx(64.559, abs=1e-3)
    assert int8.bytes_per_vector(DIM) * ROWS / GB == pytest.approx(16.224, abs=1e-3)


def test_overhead_does_not_grow_with_the_dimension() -> None:
    """What was measured beyond the values is carried over as it is."""
    hnsw = kind_of("hnsw", 100 * (384 * 4 + 272), 100, 384, 4)
    assert hnsw == Kind("hnsw", 4, 272, 384)
    assert hnsw.bytes_per_vector(768) == 768 * 4 + 272


def test_fitting_leaves_room_for_the_rest() -> None:
    """A size fits only with the reserve beside it."""
    assert fitting(22.0, (24, 80), 2.0) == [24, 80]
    assert fitting(22.1, (24, 80), 2.0) == [80]
    assert fitting(300.0, (24, 80), 2.0) == []


def test_rates_fall_with_vectors_and_dimension() -> None:
    """A scan of twice the vectors of the same size takes twice the time."""
    assert carried_rate(10.0, ROWS, DIM) == 10.0
    assert carried_rate(10.0, ROWS // 2, DIM) == pytest.approx(5.0)
    assert carried_rate(10.0, ROWS, DIM // 2) == 5.0
