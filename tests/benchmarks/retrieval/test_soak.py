"""The memory growth in a soak test, and its mix of queries."""

from itertools import islice

import pytest

from benchmarks.retrieval.soak import MIB, fit_growth, mix_queries


def test_a_cache_that_fills_is_flat() -> None:
    """Growth during the warm-up does not count."""
    seconds = [float(s) for s in range(100)]
    resident = [MIB * (100 + min(s, 25) * 4) for s in seconds]
    growth = fit_growth(seconds, resident)
    assert growth.is_flat
    assert growth.mib_per_minute == pytest.approx(0)


def test_a_leak_is_not_flat() -> None:
    """A steady growth of a MiB per second is detected, with its rate."""
    seconds = [float(s) for s in range(100)]
    growth = fit_growth(seconds, [MIB * (100 + s) for s in seconds])
    assert not growth.is_flat
    assert growth.mib_per_minute == pytest.approx(60)


def test_too_short_a_soak_is_refused() -> None:
    """A line needs two samples after the warm-up."""
    with pytest.raises(ValueError, match="expected 2 or more"):
        fit_growth([0.0], [1.0])


def test_the_mix_has_fresh_and_repeated_queries() -> None:
    """Half of the queries are new and distinct; the others are questions."""
    questions = ["a?", "b?", "c?"]
    queries = list(islice(mix_queries(questions, 0.5), 1000))
    fresh = [query for query in queries if query not in questions]
    assert len(set(fresh)) == len(fresh)
    assert 400 < len(fresh) < 600
