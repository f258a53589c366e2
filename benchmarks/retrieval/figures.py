"""Measured figures with their targets; percentiles and slopes."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured number, optionally with a target."""

    name: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the value meets its target; None without a target."""
        if self.at_least is None and self.at_most is None:
            return None
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return low <= self.value <= high

    @property
    def target(self) -> str:
        """The target and whether it is met, as a table cell; empty without a target."""
        if self.met is None:
            return ""
        bounds = []
        if self.at_least is not None:
            bounds.append(f"≥ {format_number(self.at_least)}")
        if self.at_most is not None:
            bounds.append(f"≤ {format_number(self.at_most)}")
        return f"{' and '.join(bounds)}: {'met' if self.met else '**not met**'}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields and `met` as JSON values."""
        return {**asdict(self), "met": self.met}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Figure":
        """Return the figure of a row that `to_json` returned."""
        return cls(**{key: value for key, value in row.items() if key != "met"})


def format_number(value: float) -> str:
    """Format with three significant digits and thousands separators."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile with linear interpolation between the nearest ranks, as numpy does."""
    if not values:
        raise ValueError("percentile of no values; expected at least one")
    ranked = sorted(values)
    rank = (len(ranked) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (rank - low)


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the least-squares slope of `ys` over `xs`, or 0 if all `xs` are equal."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    variation = sum((x - mean_x) ** 2 for x in xs)
    if variation == 0:
        return 0.0
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / variation
