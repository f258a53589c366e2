"""From samples to figures with intervals, and two evaluations paired by question. No torch here.

Figures are those of each set, averaged over sets, and over all rows; uncertainty comes from a
bootstrap over questions, and from McNemar's exact test.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from search_r1.evaluation.measures import by_question, sums, titles
from search_r1.evaluation.samples import Sample
from verl.errors import DataError, explain

Array = NDArray[np.float64]

NUM_RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A percentile interval of `LEVEL`."""

    low: float
    high: float


def resampled_sums(columns: Array, num_resamples: int, seed: int | list[int]) -> Array:
    """(num_resamples, num_columns) sums of columns over questions drawn with replacement.

    `columns` (num_questions, num_columns): the same questions are drawn for all columns, so that
    differences of columns are paired.
    """
    generator = np.random.default_rng(seed)
    num_questions = len(columns)
    drawn = np.empty((num_resamples, columns.shape[1]))
    for row in range(num_resamples):
        choice = generator.integers(num_questions, size=num_questions)
        drawn[row] = np.bincount(choice, minlength=num_questions) @ columns
    return drawn


def ratio(part: Array, whole: Array) -> Array:
    """part / whole, nan where the whole is 0."""
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole != 0)


def interval(values: Array) -> Interval | None:
    """The percentile interval of resampled values; none where any of them is undefined."""
    if len(values) == 0 or not np.isfinite(values).all():
        return None
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(float(low), float(high))


def p_value(differences: Array) -> float | None:
    """Two-sided bootstrap p-value that the difference is 0; none where any is undefined.

    Twice the smaller share of resampled differences on one side of 0, itself included; one
    resample is added to both counts, so that p is never 0 (Davison and Hinkley 1997).
    """
    if len(differences) == 0 or not np.isfinite(differences).all():
        return None
    fewer = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    return min(1.0, 2 * (fewer + 1) / (len(differences) + 1))


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided p-value of McNemar's test, by how many are right in one evaluation alone."""
    discordant = only_first + only_second
    return float(binomtest(only_first, discordant, 0.5).pvalue) if discordant else 1.0


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
            name: Estimate(float(value), interval(draws[where][:, i]))
            if np.isfinite(value := values[where][0, i])
            else Estimate(None, None)
            for i, name in enumerate(names)
        }
        for where in values
    }
    counts = {name: len(one.uids) for name, one in tallies.items()}
    return Summary(counts | {ROWS: sum(counts.values())}, estimates)


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
    """The difference in `measure` over common questions, by set. Raises DataError without any."""
    # A uid alone is a file's name and a row: of another file of that name it is another question.
    common = set(map(_identity, first)) & set(map(_identity, second))
    if not common:
        fix = "compare evaluations of the same data files"
        raise DataError(explain("comparison", "no question in common", "the same questions", fix))
    firsts, seconds = (
        by_set([s for s in one if _identity(s) in common]) for one in (first, second)
    )
    pairs = {}  # of each set, with a column for each evaluation
    for name in firsts:
        one, other = tally(firsts[name], [measure]), tally(seconds[name], [measure])
        parts, wholes = (one.parts, other.parts), (one.wholes, other.wholes)
        pairs[name] = Tally(one.uids, np.hstack(parts), np.hstack(wholes))
    values, draws = ratios(pairs, num_resamples, seed)
    return [
        _difference(where, values[where][0], draws[where], pairs)
        for where in (values if len(pairs) > 1 else pairs)
    ]


def _identity(one: Sample) -> tuple[str, str, str]:
    return one.data_source, one.uid, one.question


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
