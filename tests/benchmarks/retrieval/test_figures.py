"""Percentiles, slopes, and the targets of figures."""

import random

import numpy as np
import pytest

from benchmarks.retrieval.figures import Figure, format_number, percentile, slope


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("percent", [0, 1, 50, 99, 100])
def test_percentiles_equal_numpys(count: int, percent: float) -> None:
    """Every percentile of any number of values equals numpy's."""
    values = [random.Random(count).uniform(-5, 5) for _ in range(count)]
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_a_percentile_of_no_values_is_refused() -> None:
    """A run without answers has no latency."""
    with pytest.raises(ValueError, match="expected at least one"):
        percentile([], 50)


def test_the_slope_equals_numpys_fit() -> None:
    """The slope is that of numpy's least-squares line, and 0 if all x are equal."""
    draw = random.Random(0)
    xs = [float(x) for x in range(20)]
    ys = [3 * x + draw.gauss(0, 2) for x in xs]
    assert slope(xs, ys) == pytest.approx(np.polyfit(xs, ys, 1)[0])
    assert slope([1.0, 1.0], [0.0, 9.0]) == 0.0


@pytest.mark.parametrize(
    ("value", "at_least", "at_most", "met"),
    [
        (8.0, 8.0, None, True),
        (7.9, 8.0, None, False),
        (0.25, None, 0.25, True),
        (0.26, None, 0.25, False),
        (1.0, None, None, None),
    ],
)
def test_targets(value: float, at_least: float | None, at_most: float | None, met: bool) -> None:
    """A target is met if the value reaches it, and survives the way through JSON."""
    figure = Figure("rate", value, "x", at_least, at_most)
    assert figure.met is met
    assert Figure.from_json(figure.to_json()) == figure
    assert ("not met" in figure.target) is (met is False)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12345.6, "12,346"), (1500.0, "1,500"), (12.34, "12.3"), (0.01234, "0.0123")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    """Figures are written without insignificant digits."""
    assert format_number(value) == text
