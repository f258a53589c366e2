"""Averages and intervals of whole evaluations, checked with loops."""

import numpy as np
import pytest

from search_r1.evaluation.samples import Sample
from search_r1.evaluation.summary import MACRO, ROWS, summarize
from tests.evaluation.scripted import sample

RANDOM = np.random.default_rng(0)


def many(source: str, number: int, rate: float, n: int = 1) -> list[Sample]:
    """Return `number` questions with `n` samples each, correct with probability `rate`."""
    return [
        sample(f"{source}#{i}", float(RANDOM.random() < rate), source=source, number=k)
        for i in range(number)
        for k in range(n)
    ]


def test_sets_weigh_the_same_and_rows_weigh_the_same() -> None:
    """The average of sets weights sets equally; the value over all rows weights rows equally."""
    samples = many("a", 30, 0.9) + many("b", 10, 0.2)
    found = summarize(samples, num_resamples=200)
    ems = [[s.em for s in samples if s.data_source == name] for name in ("a", "b")]
    means = [sum(em) / len(em) for em in ems]
    assert found.estimates[MACRO]["em"].value == pytest.approx(sum(means) / 2)
    assert found.estimates[ROWS]["em"].value == pytest.approx(sum(map(sum, ems)) / 40)
    assert found.num_questions == {"a": 30, "b": 10, ROWS: 40}


def test_the_average_of_sets_has_the_spread_of_independent_sets() -> None:
    """The average's interval is that of a Gaussian with a quarter of the sets' summed variance."""
    found = summarize(many("a", 400, 0.5) + many("b", 100, 0.3), num_resamples=4000)
    rates = [found.estimates[s]["em"].value or 0 for s in ("a", "b")]
    variance = sum(p * (1 - p) / n for p, n in zip(rates, (400, 100), strict=True)) / 4
    spread = found.estimates[MACRO]["em"].interval
    assert spread is not None
    assert spread.high - spread.low == pytest.approx(2 * 1.96 * variance**0.5, rel=0.06)


def test_sets_are_resampled_independently() -> None:
    """The interval of the average of two equal sets is smaller by the square root of two."""
    first = many("a", 200, 0.5)
    second = [sample(s.uid.replace("a", "b"), s.em, source="b") for s in first]
    found = summarize(first + second, num_resamples=4000).estimates
    single, both = (found[where]["em"].interval for where in ("a", MACRO))
    assert single is not None
    assert both is not None
    shrunk = (both.high - both.low) / (single.high - single.low)
    assert shrunk == pytest.approx(0.5**0.5, abs=0.07)


def test_samples_of_one_question_are_drawn_together() -> None:
    """Four equal samples per question give the same interval as one."""
    single = many("a", 100, 0.5)
    four = [sample(s.uid, s.em, source="a", number=k) for s in single for k in range(4)]
    of_four, of_one = (summarize(s, num_resamples=500).estimates["a"]["em"] for s in (four, single))
    assert of_four == of_one


def test_pass_at_k_is_averaged_over_questions() -> None:
    """For one question right in one of two samples, and one never right: 1/4 and 1/2."""
    samples = [sample("q#0", 1.0, number=0), sample("q#0", 0.0, number=1),
               sample("q#1", 0.0, number=0), sample("q#1", 0.0, number=1)]  # fmt: skip
    found = summarize(samples, [1, 2], num_resamples=200).estimates["nq"]
    assert (found["pass@1"].value, found["pass@2"].value) == (0.25, 0.5)
    assert found["em"].value == 0.25


def test_the_order_of_dialogues_changes_nothing() -> None:
    """The summary does not depend on the order of the samples."""
    samples = many("a", 20, 0.5, n=2) + many("b", 20, 0.4, n=2)
    shuffled = [samples[i] for i in RANDOM.permutation(len(samples))]
    assert summarize(samples, [2], num_resamples=200) == summarize(shuffled, [2], num_resamples=200)
