"""The memory growth in a soak test, and its mix of queries."""

import pytest

from benchmarks.retrieval.soak import MIB, fit_growth


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
