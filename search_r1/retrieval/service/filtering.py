"""Reads the `filter` of a request: values of fields of the corpus, of which a hit must have one."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException

from search_r1.retrieval.engines.base import Filter
from search_r1.retrieval.fields import key
from search_r1.retrieval.service.requests import RetrieveRequest, problem
from verl.errors import did_you_mean

MAX_VALUES = 1000
"""Most values of a filter, which is a part of the key of each cached result."""


def read_filter(request: RetrieveRequest, names: Sequence[str]) -> Filter:
    """Return the filter `{"field": value or [values]}` of a request; equal ones are equal.

    `names`: the fields of the engine. Raises a 422 that names the field.
    """
    if request.filters:
        fix = "unknown field; did you mean filter?"
        raise HTTPException(422, [problem(("filters",), fix, "extra_forbidden")])
    value = request.filter
    if not isinstance(value, Mapping):
        got = f"got {type(value).__name__}, expected an object such as " + '{"year": [1990, 1991]}'
        raise HTTPException(422, [problem(("filter",), got, "filter_invalid")])
    if problems := [p for name in value if (p := _problem(name, value[name], names))]:
        raise HTTPException(422, problems)
    return tuple(
        tuple(sorted({key(name, one) for one in _values(value[name])})) for name in sorted(value)
    )


def _problem(name: str, value: Any, names: Sequence[str]) -> dict[str, Any] | None:
    """Return what is wrong with a field of a filter."""
    values = _values(value)
    if name not in names:
        listed = f"one of {', '.join(names)}" if names else "no filter: this index has no fields"
        fix = did_you_mean(name, names, "build the index with --filter_fields")
        return problem(("filter", name), f"unknown field, expected {listed}; {fix}", "filter_field")
    if not 0 < len(values) <= MAX_VALUES:
        got = f"got {len(values)} values, expected 1 to {MAX_VALUES}: search several times"
        return problem(("filter", name), got, "filter_values")
    if bad := [one for one in values if not isinstance(one, str | int | float)]:
        got = f"got {type(bad[0]).__name__}, expected text, a number, a bool or a list of them"
        return problem(("filter", name), got, "filter_value")
    return None


def _values(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
