"""Adds pass rates to question files: `search-r1 data difficulty`.

The rates are those of finished evaluations with several samples for each question, by any model.
Each row gets `pass_rate`, the share of its samples that are exactly right, and `num_samples`.
Training can leave out what is never or always right (`data.filter={pass_rate: {gt: 0, lt: 1}}`).
"""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

import pyarrow

from search_r1.datasets.columns import Columns, by_set, read_questions, targets, write_columns
from search_r1.datasets.command import DifficultyOptions
from search_r1.datasets.question import Question
from search_r1.evaluation.samples import FAILED
from search_r1.evaluation.store import read_evaluation
from search_r1.plain import markdown_table
from verl.errors import ConfigError, DataError, explain

COLUMNS = {"pass_rate": pyarrow.float64(), "num_samples": pyarrow.int64()}
"""The new columns with their types."""

Scores = Mapping[tuple[str, str], Sequence[float]]
"""EM of each sample, by set and question."""


def build(options: DifficultyOptions) -> int:
    """Write the files with the new columns, and print how many questions are how difficult."""
    if not options.evaluations:
        fix = "give the --out of search-r1 evaluate --n 8 --temperature 1"
        raise ConfigError(explain("--evaluations", "nothing", "finished evaluations", fix))
    files, scores = targets(options.files, options.local_dir), read_scores(options)
    rated: list[tuple[Question, Columns]] = []
    for path, target in files.items():
        questions = read_questions(path)
        columns = [rates_of(question, scores) for question in questions]
        write_columns(path, target, columns, COLUMNS)
        rated += zip(questions, columns, strict=True)
    sys.stdout.write(table(rated))
    return 0


def read_scores(options: DifficultyOptions) -> Scores:
    """Pool the samples of all evaluations, but for failed ones, which say nothing of the model.

    Raises DataError for an unfinished evaluation.
    """
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    for folder in options.evaluations:
        for sample in read_evaluation(folder)[1]:
            if sample.status != FAILED:
                scores[sample.data_source, sample.question].append(sample.em)
    return scores


def rates_of(question: Question, scores: Scores) -> Columns:
    """Return the new columns of a question. Raises DataError if no evaluation has it."""
    found = scores.get((question.data_source, question.text))
    if not found:
        got = f"no sample of {question.text!r} ({question.data_source})"
        fix = "evaluate this file, or give only the files that were evaluated"
        raise DataError(explain("--evaluations", got, "samples of every question", fix))
    return {"pass_rate": fmean(found), "num_samples": len(found)}


def table(rated: Sequence[tuple[Question, Columns]]) -> str:
    """Format the mean pass rate by set, and how many questions are never or always right."""
    heads = ["set", "questions", "pass rate", "never right", "sometimes", "always"]
    lines = []
    for name, numbers in by_set([question.data_source for question, _ in rated]).items():
        rates = [float(rated[number][1]["pass_rate"] or 0) for number in numbers]
        never, always = rates.count(0.0), rates.count(1.0)
        counts = [len(rates), never, len(rates) - never - always, always]
        first, *others = map(str, counts)
        lines.append([name, first, f"{100 * fmean(rates):.1f}", *others])
    return markdown_table(heads, lines)
