"""Paired comparisons, checked with loops and formulas."""

import math
from dataclasses import replace

import numpy as np
import pytest

from search_r1.evaluation.samples import Sample
from search_r1.evaluation.summary import MACRO, ROWS, compare
from tests.evaluation.scripted import sample
from verl.errors import DataError


def scored(ems: list[float], source: str = "a") -> list[Sample]:
    return [sample(f"{source}#{i}", em, source=source) for i, em in enumerate(ems)]


def test_differences_are_counted_by_question() -> None:
    """Difference, counts of discordant questions, and McNemar's p-value."""
    first = scored([1, 1, 1, 1, 0, 0, 1, 0])
    second = list(reversed(scored([1, 0, 0, 0, 1, 0, 1, 0])))
    (found,) = compare(first, second, num_resamples=200)
    assert (found.first, found.second, found.difference) == (5 / 8, 3 / 8, 2 / 8)
    assert (found.only_first, found.only_second) == (3, 1)
    assert found.p_mcnemar == pytest.approx(2 * sum(math.comb(4, i) for i in (0, 1)) / 16)


def test_the_interval_is_that_of_paired_differences() -> None:
    """The interval's width follows the standard deviation of the paired differences."""
    random = np.random.default_rng(0)
    base = (random.random(600) < 0.5).astype(float)
    other = np.where(random.random(600) < 0.1, 1 - base, base)
    (found,) = compare(scored(list(base)), scored(list(other)), num_resamples=4000)
    assert found.interval is not None
    expected = 2 * 1.96 * float(np.std(base - other)) / 600**0.5
    assert found.interval.high - found.interval.low == pytest.approx(expected, rel=0.06)


def test_an_evaluation_does_not_differ_from_itself() -> None:
    """Comparing an evaluation with itself gives difference 0 and p 1."""
    ems = [1.0, 0.0, 1.0, 0.0]
    (found,) = compare(scored(ems), scored(ems), num_resamples=200)
    assert (found.difference, found.p_bootstrap, found.p_mcnemar) == (0, 1, 1)


def test_averages_over_sets_and_rows() -> None:
    """The average weights sets equally and has no McNemar test; all rows together have one."""
    first = scored([1, 1, 1, 0], "a") + scored([0, 1], "b")
    second = scored([0, 0, 1, 0], "a") + scored([0, 1], "b")
    found = {d.where: d for d in compare(first, second, num_resamples=200)}
    assert list(found) == ["a", "b", MACRO, ROWS]
    assert found[MACRO].difference == pytest.approx((2 / 4 + 0) / 2)
    assert found[ROWS].difference == pytest.approx(2 / 6)
    assert found[MACRO].p_mcnemar is None
    assert (found[ROWS].only_first, found[ROWS].only_second) == (2, 0)


def test_only_common_questions_are_compared() -> None:
    """Questions that only one evaluation has are ignored; no common question is an error."""
    (found,) = compare(scored([1, 1, 0]), scored([0, 1]), num_resamples=200)
    assert (found.num_questions, found.first) == (2, 1.0)
    with pytest.raises(DataError):
        compare(scored([1], "a"), scored([1], "b"))
    other = [replace(s, data_source="b") for s in scored([1, 0], "a")]
    with pytest.raises(DataError):  # two files with the same name
        compare(scored([1, 0], "a"), other)


def test_several_samples_a_question_have_no_mcnemar_test() -> None:
    """With several samples per question there is no McNemar test."""
    twice = [sample("a#0", em, source="a", number=k) for k, em in enumerate((1.0, 0.0))]
    (found,) = compare(twice, scored([1.0]), num_resamples=200)
    assert (found.first, found.p_mcnemar) == (0.5, None)
