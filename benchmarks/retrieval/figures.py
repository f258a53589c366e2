"""What a measurement yields: figures with their bars, percentiles, and slopes. Pure arithmetic."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured number; a figure with a bar is met or not met."""

    name: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the value is within its bar; None without one."""
        if self.at_least is None and self.at_most is None:
            return None
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        return low <= self.value <= high

    @property
    def bar(self) -> str:
        """The bar and the verdict, for a table."""
        if self.met is None:
            return ""
        signs = (("≥", self.at_least), ("≤", self.at_most))
        bounds = " and ".join(f"{s} {number(v)}" for s, v in signs if v is not None)
        return f"{bounds}: {'met' if self.met else '**not met**'}"

    def to_json(self) -> dict[str, Any]:
        """JSON-ready fields and the verdict."""
        return {**asdict(self), "met": self.met}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> "Figure":
        """The figure that `to_json` wrote."""
        return cls(**{key: value for key, value in row.items() if key != "met"})


def number(value: float) -> str:
    """`value` as people read it: three significant digits, thousands apart."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks, as numpy's default."""
    if not values:
        raise ValueError("percentile of no values; expected at least one")
    ranked = sorted(values)
    place = (len(ranked) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least-squares slope of `ys` over `xs`; 0 where `xs` do not differ."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread == 0:
        return 0.0
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
