"""Two evaluations of the same questions, paired by uid: differences, intervals, tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search_r1.evaluation.intervals import (
    NUM_RESAMPLES,
    Array,
    Interval,
    interval,
    mcnemar,
    p_value,
)
from search_r1.evaluation.samples import Sample
from search_r1.evaluation.summary import MACRO, Tally, by_set, ratios, tally
from verl.errors import DataError, explain


@dataclass(frozen=True)
class Difference:
    """First minus second, over the questions that both have."""

    where: str
    """A set, or an average."""
    num_questions: int
    first: float
    second: float
    difference: float
    interval: Interval | None
    p_bootstrap: float | None
    only_first: int | None = None
    """Questions that the first alone answers correctly; none with several samples a question."""
    only_second: int | None = None
    p_mcnemar: float | None = None


def compare(
    first: Sequence[Sample],
    second: Sequence[Sample],
    measure: str = "em",
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> list[Difference]:
    """The difference in `measure` for each set, averaged over sets, and over all rows.

    Only questions that both evaluations have are compared. Raises DataError if there are none.
    """
    common = {s.uid for s in first} & {s.uid for s in second}
    if not common:
        fix = "compare evaluations of the same data files"
        raise DataError(explain("comparison", "no question in common", "equal uids", fix))
    firsts, seconds = (by_set([s for s in one if s.uid in common]) for one in (first, second))
    pairs = {
        name: _paired(tally(firsts[name], [measure]), tally(seconds[name], [measure]))
        for name in firsts
    }
    values, draws = ratios(pairs, num_resamples, seed)
    return [
        _difference(where, values[where][0], draws[where], pairs)
        for where in (values if len(pairs) > 1 else pairs)
    ]


def _paired(first: Tally, second: Tally) -> Tally:
    """One set's questions, with a column for each evaluation."""
    parts, wholes = (first.parts, second.parts), (first.wholes, second.wholes)
    return Tally(first.uids, np.hstack(parts), np.hstack(wholes))


def _difference(where: str, values: Array, draws: Array, pairs: dict[str, Tally]) -> Difference:
    """Of one set or average: `values` (2,) and `draws` (num_resamples, 2) of both evaluations."""
    tallies = [pairs[where]] if where in pairs else list(pairs.values())
    parts = np.vstack([one.parts for one in tallies])
    wholes = np.vstack([one.wholes for one in tallies])
    first, second = (float(value) for value in values)
    apart = draws[:, 0] - draws[:, 1]
    result = (where, len(parts), first, second, first - second, interval(apart), p_value(apart))
    # McNemar's test counts questions that are right or wrong; an average of sets weighs them.
    if where == MACRO or not (wholes == 1).all() or not np.isin(parts, (0, 1)).all():
        return Difference(*result)
    only_first, only_second = (int((parts[:, a] > parts[:, b]).sum()) for a, b in ((0, 1), (1, 0)))
    return Difference(*result, only_first, only_second, mcnemar(only_first, only_second))
