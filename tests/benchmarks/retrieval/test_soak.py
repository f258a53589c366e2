"""The soak's verdict and its mix of queries."""

from itertools import islice

import pytest

from benchmarks.retrieval.soak import MIB, judge, mixed


def test_a_cache_that_fills_is_flat() -> None:
    """Growth during the warm-up does not count."""
    seconds = [float(s) for s in range(100)]
    resident = [MIB * (100 + min(s, 25) * 4) for s in seconds]
    verdict = judge(seconds, resident)
    assert verdict.is_flat
    assert verdict.mib_per_minute == pytest.approx(0)


def test_a_leak_is_not_flat() -> None:
    """A steady MiB per second is found, with its rate."""
    seconds = [float(s) for s in range(100)]
    verdict = judge(seconds, [MIB * (100 + s) for s in seconds])
    assert not verdict.is_flat
    assert verdict.mib_per_minute == pytest.approx(60)


def test_too_short_a_soak_is_refused() -> None:
    """Nothing can be said without samples."""
    with pytest.raises(ValueError, match="expected 2 or more"):
        judge([0.0], [1.0])


def test_the_mix_has_fresh_and_repeated_queries() -> None:
    """Half of the queries are new each time, the others come from the questions."""
    questions = ["a?", "b?", "c?"]
    asked = list(islice(mixed(questions, 0.5), 1000))
    fresh = [query for query in asked if query not in questions]
    assert len(set(fresh)) == len(fresh)
    assert 400 < len(fresh) < 600
