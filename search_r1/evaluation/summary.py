"""Statistics of evaluations: measures with intervals, and paired comparisons; no torch.

Measures are computed per set, averaged over sets, and over all rows. Uncertainty comes from a
bootstrap over questions and from McNemar's exact test.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search_r1.evaluation.measures import by_question, measure_sums, titles
from search_r1.evaluation.samples import Sample
from verl.errors import DataError, explain

Array = NDArray[np.float64]

NUM_RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A percentile interval with confidence `LEVEL`."""

    low: float
    high: float


def resampled_sums(columns: Array, num_resamples: int, seed: int | list[int]) -> Array:
    """Sum columns over questions drawn with replacement; shape (num_resamples, num_columns).

    `columns` (num_questions, num_columns): the same questions are drawn for all columns, so that
    differences between columns are paired.
    """
    generator = np.random.default_rng(seed)
    num_questions = len(columns)
    drawn = np.empty((num_resamples, columns.shape[1]))
    for row in range(num_resamples):
        choice = generator.integers(num_questions, size=num_questions)
        drawn[row] = np.bincount(choice, minlength=num_questions) @ columns
    return drawn


def ratio(part: Array, whole: Array) -> Array:
    """Compute part / whole, NaN where the whole is 0."""
    return np.divide(part, whole, out=np.full_like(part, np.nan), where=whole != 0)


def interval(values: Array) -> Interval | None:
    """Return the percentile interval of resampled values; None if any value is undefined."""
    if len(values) == 0 or not np.isfinite(values).all():
        return None
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return Interval(float(low), float(high))


def p_value(differences: Array) -> float | None:
    """Return the two-sided bootstrap p-value of no difference; None if any value is undefined.

    It is twice the smaller share of resampled differences on one side of 0 (0 included). Numerator
    and denominator are increased by 1, so that p is never 0 (Davison and Hinkley 1997).
    """
    if len(differences) == 0 or not np.isfinite(differences).all():
        return None
    fewer = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    return min(1.0, 2 * (fewer + 1) / (len(differences) + 1))


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of McNemar's test on questions that only one got right."""
    from scipy.stats import binomtest  # noqa: PLC0415 - takes half a second

    discordant = only_first + only_second
    return float(binomtest(only_first, discordant, 0.5).pvalue) if discordant else 1.0


MACRO = "average of sets"
ROWS = "all rows"


@dataclass(frozen=True)
class Estimate:
    """The value of a measure; None if undefined, e.g. the cost per correct answer without any."""

    value: float | None
    interval: Interval | None


@dataclass(frozen=True)
class Summary:
    """All measures of one evaluation."""

    num_questions: Mapping[str, int]
    """Number of questions by set, including `ROWS`."""
    estimates: Mapping[str, Mapping[str, Estimate]]
    """Estimates by set (followed by `MACRO` and `ROWS`), then by measure."""


@dataclass(frozen=True)
class QuestionSums:
    """The sums Σ part and Σ whole of each question of one set."""

    parts: Array
    """(num_questions, num_measures)"""
    wholes: Array
    """(num_questions, num_measures)"""


def by_set(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Group samples by data source, in alphabetical order."""
    names = sorted({sample.data_source for sample in samples})
    return {name: [s for s in samples if s.data_source == name] for name in names}


def question_sums(
    samples: Sequence[Sample], names: Sequence[str], pass_k: Sequence[int] = ()
) -> QuestionSums:
    """Compute the sums of the named measures per question, ordered by uid."""
    rows = [measure_sums(group, pass_k) for _, group in sorted(by_question(samples).items())]
    table = np.array([[row[name] for name in names] for row in rows], dtype=np.float64)
    return QuestionSums(table[:, :, 0], table[:, :, 1])


def set_ratios(
    sums_by_set: Mapping[str, QuestionSums], num_resamples: int, seed: int
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Compute the measures of each set, averaged over sets, and over all rows, and resample them.

    Returns values (1, num_measures) and resampled values (num_resamples, num_measures) by set;
    questions are resampled within their sets.
    """
    totals, resampled = {}, {}
    for index, (name, sums) in enumerate(sums_by_set.items()):
        columns = np.hstack([sums.parts, sums.wholes])
        totals[name] = columns.sum(axis=0, keepdims=True)
        resampled[name] = resampled_sums(columns, num_resamples, [seed, index])
    return _with_averages(totals), _with_averages(resampled)


def _with_averages(totals: Mapping[str, Array]) -> dict[str, Array]:
    """Add the averages over sets and rows to the ratios; columns are the parts, then the wholes."""
    ratios = {name: ratio(*np.hsplit(total, 2)) for name, total in totals.items()}
    rows = ratio(*np.hsplit(np.sum(list(totals.values()), axis=0), 2))
    return ratios | {MACRO: np.mean(list(ratios.values()), axis=0), ROWS: rows}


def summarize(
    samples: Sequence[Sample],
    pass_k: Sequence[int] = (),
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Summary:
    """Compute all measures with their percentile intervals."""
    names = list(titles(pass_k))
    sums = {name: question_sums(group, names, pass_k) for name, group in by_set(samples).items()}
    values, resampled = set_ratios(sums, num_resamples, seed)
    estimates = {
        where: {name: _estimate(values[where][0, i], resampled[where][:, i])
                for i, name in enumerate(names)}
        for where in values
    }  # fmt: skip
    counts = {name: len(set_sums.parts) for name, set_sums in sums.items()}
    return Summary(counts | {ROWS: sum(counts.values())}, estimates)


def _estimate(value: float, resampled: Array) -> Estimate:
    is_defined = np.isfinite(value)
    return Estimate(float(value), interval(resampled)) if is_defined else Estimate(None, None)


@dataclass(frozen=True)
class Difference:
    """The difference first minus second, over the questions that both evaluations have."""

    where: str
    """A set, `MACRO` or `ROWS`."""
    num_questions: int
    first: float
    second: float
    difference: float
    interval: Interval | None
    p_bootstrap: float | None
    only_first: int | None = None
    """Questions that only the first answers correctly; None with several samples per question."""
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
    """Compare a measure over common questions, by set. Raises DataError if there are none."""
    # The uid alone (file name and row) is not unique, since several files may have that name.
    common = set(map(_question_key, first)) & set(map(_question_key, second))
    if not common:
        fix = "compare evaluations of the same data files"
        raise DataError(explain("comparison", "no question in common", "the same questions", fix))
    first_sets = by_set([sample for sample in first if _question_key(sample) in common])
    second_sets = by_set([sample for sample in second if _question_key(sample) in common])
    pairs = {}  # sums by set, with a column for each of the two evaluations
    for name in first_sets:
        first_sums = question_sums(first_sets[name], [measure])
        second_sums = question_sums(second_sets[name], [measure])
        parts = np.hstack([first_sums.parts, second_sums.parts])
        wholes = np.hstack([first_sums.wholes, second_sums.wholes])
        pairs[name] = QuestionSums(parts, wholes)
    values, resampled = set_ratios(pairs, num_resamples, seed)
    return [
        _difference(where, values[where][0], resampled[where], pairs)
        for where in (values if len(pairs) > 1 else pairs)
    ]


def _question_key(sample: Sample) -> tuple[str, str, str]:
    return sample.data_source, sample.uid, sample.question


def _difference(
    where: str, values: Array, resampled: Array, pairs: dict[str, QuestionSums]
) -> Difference:
    """Compute the difference in a set from `values` (2,) and `resampled` (num_resamples, 2)."""
    sums = [pairs[where]] if where in pairs else list(pairs.values())
    parts = np.vstack([set_sums.parts for set_sums in sums])
    wholes = np.vstack([set_sums.wholes for set_sums in sums])
    first, second = (float(value) for value in values)
    differences = resampled[:, 0] - resampled[:, 1]
    result = (where, len(parts), first, second, first - second, interval(differences),
              p_value(differences))  # fmt: skip
    # McNemar's test needs unweighted questions that are right or wrong.
    if where == MACRO or not (wholes == 1).all() or not np.isin(parts, (0, 1)).all():
        return Difference(*result)
    only_first = int((parts[:, 0] > parts[:, 1]).sum())
    only_second = int((parts[:, 1] > parts[:, 0]).sum())
    return Difference(*result, only_first, only_second, mcnemar(only_first, only_second))
