"""Groups the questions of finished evaluations by a column of a question file, instead of by set.

The file may have been made after the evaluation, as by `search-r1 data audit`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from search_r1.agent.question import question_of
from search_r1.evaluation.report import FinishedEvaluation
from verl.data.rows import load_rows
from verl.errors import DataError, explain

Labels = dict[tuple[str, str], str]
"""Values of a column by set and question."""


def read_labels(files: Sequence[Path], column: str) -> Labels:
    """Read a column of question files, or of their `extra_info`.

    Raises DataError if a row lacks it, or if a question has two values.
    """
    labels: Labels = {}
    for row in load_rows([str(file) for file in files], columns=[column]):
        key = row.data_source, question_of(row)
        if column not in row.extra_info:
            fix = f"name one of: {', '.join(map(str, row.extra_info))}"
            got = f"{column}, which row {row.number} of {row.file} has not"
            raise DataError(explain("--by", got, "a column of --by-data", fix))
        label = f"{column}={row.extra_info[column]}"
        if labels.setdefault(key, label) != label:
            got = f"{labels[key]} and {label} for {key[1]!r}"
            raise DataError(explain("--by", got, "one value for a question", "drop a row"))
    return labels


def by_labels(evaluation: FinishedEvaluation, labels: Labels) -> FinishedEvaluation:
    """Return the evaluation with the labels of its questions in place of their sets.

    Raises DataError for a question without one.
    """
    samples = []
    for sample in evaluation.samples:
        label = labels.get((sample.data_source, sample.question))
        if label is None:
            got = f"no row for {sample.question!r} of {evaluation.name}"
            fix = "give the files that were evaluated, with the column"
            raise DataError(explain("--by-data", got, "a row for each question", fix))
        samples.append(replace(sample, data_source=label))
    return replace(evaluation, samples=samples)
