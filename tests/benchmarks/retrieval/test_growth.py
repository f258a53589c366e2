"""The fit of growing indexes: its prediction and its error, and a run over few rows."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.retrieval.growth import measure, power, summary, write_inputs


def test_a_power_is_found_again() -> None:
    """Exact powers are predicted without an error; another point says how wrong a fit is."""
    rows = [1000, 2000, 4000]
    values = [3.0 * n**1.2 for n in rows]
    assert power(rows[:2], values[:2], 4000) == pytest.approx(values[2])
    [line] = summary("SQ8", rows, [{"build_s": value} for value in [*values[:2], values[2] / 2]])
    assert "+100.0 %" in line


def test_few_rows_are_built_and_searched(tmp_path: Path) -> None:
    """Flat finds what the search beside the writing found; real vectors set the dimension."""
    real = np.random.default_rng(1).standard_normal((50, 16)).astype(np.float32)
    queries, exact = write_inputs(tmp_path, 3000, real)
    point = measure(tmp_path, "Flat", queries, exact)
    assert point["recall"] == 1 and point["bytes"] == pytest.approx(3000 * 16 * 4, rel=0.01)
    assert measure(tmp_path, "SQ8", queries, exact)["bytes"] < point["bytes"] / 3
