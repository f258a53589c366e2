"""Intervals and tests, checked against scipy, known distributions and formulas."""

import math

import numpy as np
import pytest
from scipy import stats

from search_r1.evaluation.summary import (
    interval,
    mcnemar,
    p_value,
    ratio,
    resampled_sums,
)

RANDOM = np.random.default_rng(3)


def test_a_mean_has_the_interval_that_scipy_gives() -> None:
    """The percentile bootstrap of a mean agrees with scipy's."""
    values = RANDOM.gamma(2.0, size=300)
    drawn = resampled_sums(values[:, None], 4000, 0)[:, 0] / 300
    theirs = stats.bootstrap(
        (values,), np.mean, method="percentile", n_resamples=4000, rng=np.random.default_rng(1)
    ).confidence_interval
    ours = interval(drawn)
    assert ours is not None
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.015)


def test_a_conditional_rate_has_the_interval_that_scipy_gives() -> None:
    """The bootstrap of a ratio draws numerator and denominator together, as scipy's does."""
    whole = (RANDOM.random(400) < 0.4).astype(float)
    part = whole * (RANDOM.random(400) < 0.7)
    drawn = resampled_sums(np.stack([part, whole], axis=1), 4000, 0)
    theirs = stats.bootstrap(
        (part, whole), lambda p, w, axis: p.sum(axis) / w.sum(axis), paired=True,
        vectorized=True, method="percentile", n_resamples=4000, rng=np.random.default_rng(1),
    ).confidence_interval  # fmt: skip
    ours = interval(ratio(drawn[:, 0], drawn[:, 1]))
    assert ours is not None
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.015)


def test_resampled_counts_are_multinomial() -> None:
    """Counts of drawn questions have the mean and variance of a multinomial distribution."""
    counts = resampled_sums(np.eye(20), 5000, 0)
    assert (counts.sum(axis=1) == 20).all()
    assert counts.mean() == pytest.approx(1.0)
    assert counts.var() == pytest.approx(1 - 1 / 20, rel=0.03)


def test_columns_are_drawn_together_and_by_seed() -> None:
    """Equal columns have equal sums in each resample; results depend only on the seed."""
    column = RANDOM.random((50, 1))
    drawn = resampled_sums(np.hstack([column, column]), 100, 7)
    assert (drawn[:, 0] == drawn[:, 1]).all()
    assert (drawn == resampled_sums(np.hstack([column, column]), 100, 7)).all()
    assert (drawn != resampled_sums(np.hstack([column, column]), 100, 8)).any()


def test_what_may_be_undefined_has_no_interval() -> None:
    """If the measure is undefined in any resample, it has no interval and no p-value."""
    part, whole = np.array([1.0, 1.0]), np.array([1.0, 0.0])
    assert np.isnan(ratio(part, whole)).tolist() == [False, True]
    assert interval(ratio(part, whole)) is None
    assert p_value(ratio(part, whole)) is None


def test_no_difference_is_found_as_often_as_it_should_be() -> None:
    """Under the null hypothesis, p is below 0.1 in about a tenth of the repetitions."""
    small = 0
    for repeat in range(200):
        values = np.random.default_rng(repeat).normal(size=(60, 1))
        p = p_value(resampled_sums(values, 400, repeat)[:, 0])
        assert p is not None
        small += p < 0.1
    assert 8 <= small <= 36


@pytest.mark.parametrize(("values", "p"), [([1.0] * 99, 2 / 100), ([0.0] * 99, 1.0)])
def test_p_at_its_ends(values: list[float], p: float) -> None:
    """The p-value is never 0 and never above 1."""
    assert p_value(np.array(values)) == pytest.approx(p)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (5, 5), (3, 11), (14, 2), (0, 9)])
def test_mcnemar_is_the_binomial_formula(first: int, second: int) -> None:
    """McNemar's p is twice the binomial tail of the smaller count, at most 1."""
    total = first + second
    tail = sum(math.comb(total, i) for i in range(min(first, second) + 1)) / 2**total
    assert mcnemar(first, second) == pytest.approx(min(1.0, 2 * tail))
    assert mcnemar(first, second) == mcnemar(second, first)
