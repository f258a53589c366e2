"""Choosing training rows by further columns of their files."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from verl.bounds import Bounds
from verl.config.data import DataConfig
from verl.data.records import short_repr
from verl.data.rows import Row
from verl.errors import DataError, explain


@dataclass(frozen=True)
class Columns:
    """Which rows are used, by `data.filter`, and the column of their weights, if any."""

    wanted: Mapping[str, Any] = field(default_factory=dict)
    """A value, a list of values, or bounds of a number (`ge`, `gt`, `le`, `lt`), by column."""
    weight: str | None = None

    @classmethod
    def of_training(cls, data: DataConfig) -> "Columns":
        """Return the columns that the options of the training rows name."""
        return cls(data.filter, data.weight_column)

    @property
    def names(self) -> list[str]:
        """All columns that must be read."""
        return [*self.wanted, *([] if self.weight is None else [self.weight])]

    def matching(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows with one of the wanted values in each column.

        Raises DataError if a row lacks a column, has an impossible weight, or if none is left.
        """
        for row in rows:
            if missing := [name for name in self.names if name not in row.extra_info]:
                option = "data.filter" if missing[0] in self.wanted else "data.weight_column"
                known = ", ".join(map(str, row.extra_info)) or "none"
                expected = f"a column of {row.file}, or a key of extra_info"
                fix = f"add it, or name one of: {known}"
                got = f"{missing[0]}, which row {row.number} has not"
                raise DataError(explain(option, got, expected, fix))
        tests = {name: _test(name, wanted) for name, wanted in self.wanted.items()}
        kept = [r for r in rows if all(test(r.extra_info[name]) for name, test in tests.items())]
        if rows and not kept:
            seen = {name: self._values(rows, name) for name in self.wanted}
            fix = "choose values that the rows have"
            raise DataError(explain("data.filter", dict(self.wanted), f"values of {seen}", fix))
        for row in kept:
            self._check_weight(row)
        return kept

    def _values(self, rows: Sequence[Row], name: str) -> str:
        """Return the first different values of a column as text."""
        return ", ".join(list(dict.fromkeys(short_repr(row.extra_info[name]) for row in rows))[:10])

    def _check_weight(self, row: Row) -> None:
        if self.weight is None:
            return
        value = row.extra_info[self.weight]
        if not _is_number(value) or not 0 <= value < math.inf:
            expected, fix = "a number, 0 or more", "correct it, or leave the row out"
            subject = f"{row.uid}, {self.weight} (data.weight_column)"
            raise DataError(explain(subject, short_repr(value), expected, fix))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _test(name: str, wanted: Any) -> Callable[[Any], bool]:
    """Return whether a value of a column is wanted. Raises DataError for impossible bounds."""
    if isinstance(wanted, Mapping):
        bounds = _bounds(name, wanted)
        return lambda value: _is_number(value) and value in bounds
    values = wanted if isinstance(wanted, list | tuple) else [wanted]
    pairs = [(wanted, isinstance(wanted, bool)) for wanted in values]  # in Python, True equals 1
    return lambda value: (value, isinstance(value, bool)) in pairs


def _bounds(name: str, wanted: Mapping[str, Any]) -> Bounds:
    """Return bounds as numbers. Raises DataError for others."""
    known = [field.name for field in fields(Bounds)]
    if not wanted.keys() <= set(known) or not all(map(_is_number, wanted.values())):
        expected = f"numbers by {', '.join(known)}"
        fix = f"data.filter={{{name}: {{gt: 0, lt: 1}}}}"
        raise DataError(explain(f"data.filter, {name}", dict(wanted), expected, fix))
    return Bounds(**wanted)


ALL_ROWS = Columns()
"""No column is read."""
