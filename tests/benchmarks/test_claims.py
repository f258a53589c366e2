"""The summary of the benchmark of claimed groups."""

import math

import pytest

from benchmarks.claims import summary


def test_the_summary_has_the_ratios_and_half_of_the_interval() -> None:
    """The split is 1, 2 and 3 times as slow: a deviation of 1, over the root of 3 rounds."""
    rows = [{"split": split, "claims": 2.0} for split in (2.0, 4.0, 6.0)]
    result = summary(rows)
    assert (result["ratio"], result["median"], result["ratios"]) == (2.0, 2.0, [1.0, 2.0, 3.0])
    assert result["half_interval"] == pytest.approx(1.96 / math.sqrt(3), abs=1e-3)


def test_a_single_round_has_no_interval() -> None:
    """A deviation needs two rounds."""
    assert summary([{"split": 3.0, "claims": 2.0}])["half_interval"] is None
