"""From samples to figures with intervals: for each set, averaged over sets, and over all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from search_r1.evaluation.intervals import (
    NUM_RESAMPLES,
    Array,
    Interval,
    interval,
    ratio,
    resampled_sums,
)
from search_r1.evaluation.measures import by_question, sums, titles
from search_r1.evaluation.samples import Sample

MACRO = "average of sets"
ROWS = "all rows"


@dataclass(frozen=True)
class Estimate:
    """A figure; none where it is undefined, as the cost of a correct answer where none is."""

    value: float | None
    interval: Interval | None


@dataclass(frozen=True)
class Summary:
    """Every measure of one evaluation."""

    num_questions: Mapping[str, int]
    """By set, `ROWS` among them."""
    estimates: Mapping[str, Mapping[str, Estimate]]
    """By set (then `MACRO` and `ROWS`), then by measure."""

    def to_json(self) -> dict[str, Any]:
        """As `metrics.json` holds it."""
        return asdict(self)


@dataclass(frozen=True)
class Tally:
    """The sums of each question of one set."""

    uids: tuple[str, ...]
    parts: Array
    """(num_questions, num_measures)"""
    wholes: Array
    """(num_questions, num_measures)"""


def by_set(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """The samples of each data source, by name in alphabetical order."""
    names = sorted({sample.data_source for sample in samples})
    return {name: [s for s in samples if s.data_source == name] for name in names}


def tally(samples: Sequence[Sample], names: Sequence[str], pass_k: Sequence[int] = ()) -> Tally:
    """The sums of the named measures for each question, questions in the order of their uids."""
    questions = dict(sorted(by_question(samples).items()))
    found = [sums(of_one, pass_k) for of_one in questions.values()]
    table = np.array([[row[name] for name in names] for row in found], dtype=np.float64)
    return Tally(tuple(questions), table[:, :, 0], table[:, :, 1])


def ratios(
    tallies: Mapping[str, Tally], num_resamples: int, seed: int
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The measures of each set, averaged over sets, and over all rows; then as resampled.

    (1, num_measures) and (num_resamples, num_measures); questions are resampled within their sets.
    """
    totals, drawn = {}, {}
    for index, (name, one) in enumerate(tallies.items()):
        columns = np.hstack([one.parts, one.wholes])
        totals[name] = columns.sum(axis=0, keepdims=True)
        drawn[name] = resampled_sums(columns, num_resamples, [seed, index])
    return _with_averages(totals), _with_averages(drawn)


def _with_averages(totals: Mapping[str, Array]) -> dict[str, Array]:
    """Ratios of each set, their plain average, and those over all rows; the wholes stand last."""
    found = {name: ratio(*np.hsplit(total, 2)) for name, total in totals.items()}
    rows = ratio(*np.hsplit(np.sum(list(totals.values()), axis=0), 2))
    return found | {MACRO: np.mean(list(found.values()), axis=0), ROWS: rows}


def summarize(
    samples: Sequence[Sample],
    pass_k: Sequence[int] = (),
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Summary:
    """Every measure with its percentile interval."""
    names = list(titles(pass_k))
    tallies = {name: tally(found, names, pass_k) for name, found in by_set(samples).items()}
    values, draws = ratios(tallies, num_resamples, seed)
    estimates = {
        where: {
            name: _estimate(values[where][0, i], draws[where][:, i]) for i, name in enumerate(names)
        }
        for where in values
    }
    counts = {name: len(one.uids) for name, one in tallies.items()}
    return Summary(counts | {ROWS: sum(counts.values())}, estimates)


def _estimate(value: float, draws: Array) -> Estimate:
    if not np.isfinite(value):
        return Estimate(None, None)
    return Estimate(float(value), interval(draws))
