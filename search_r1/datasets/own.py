"""A user's own files: csv, jsonl or parquet of questions as rows, and texts as a corpus.

A csv has a header with `question` and `answer`; several accepted answers stand in one field with
a separator between them. jsonl and parquet have `question` and `golden_answers`, `answers` or
`answer`. Rows that name a `split` go to `<split>.parquet`; the others are divided into
`train.parquet` and `test.parquet`.
"""

import csv
import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from search_r1.datasets.command import CorpusOptions, OwnOptions
from search_r1.datasets.question import (
    ANSWER_COLUMNS,
    Question,
    RecordLocation,
    make_rows,
    read_question,
    valid_questions,
    write_rows,
)
from search_r1.datasets.wording import PromptStyle, prompt_writer
from search_r1.search.index.passages import read_folder, write_corpus
from verl.data.rows import BadRow, Record, read_records
from verl.errors import ConfigError, DataError, explain
from verl.files import MAX_CHARS, regular_file

logger = logging.getLogger(__name__)


def build(options: OwnOptions) -> int:
    """Read all files, then write a parquet file for each split."""
    if not options.files:
        raise ConfigError(explain("FILE", "nothing", "csv, jsonl or parquet", "name one or more"))
    words = prompt_writer(PromptStyle.SEARCH, options.template_type)
    names = options.data_sources.split(",") if options.data_sources else ()
    found = select(valid_questions(read_files(options), drop_bad=options.drop_bad_rows), names)
    questions = divide(found, options.test_share, options.seed)
    for split in sorted({question.split for question in questions}):
        some = [question for question in questions if question.split == split]
        rows = make_rows(some, words, split, keep_extra=True)
        write_rows(rows, options.local_dir / f"{split}.parquet")
    return 0


def build_corpus(options: CorpusOptions) -> int:
    """Write a folder's texts as a corpus of passages. Raises SearchError."""
    count = write_corpus(read_folder(options.folder, options.max_words), options.out)
    logger.info("%s: %d passages", options.out, count)
    return 0


def read_files(options: OwnOptions) -> Iterator[Question | BadRow]:
    """The questions of all files, or what is wrong with a row. Raises DataError."""
    for path in options.files:
        source = options.data_source or path.stem
        is_csv = path.suffix == ".csv"
        records = _read_csv(path, options.answer_separator) if is_csv else None
        for number, record in records or read_records(str(path), ("question",)):
            yield read_question(record, RecordLocation(str(path), number, source, options.split))


def divide(questions: Sequence[Question], test_share: float, seed: int = 0) -> list[Question]:
    """Give questions without a split theirs: `test_share` of them `test`, the others `train`.

    A question's side depends on its words and the seed, not on its place, and questions of the
    same words are on one side. Raises ConfigError for a share that leaves a side empty.
    """

    def rank(key: str) -> bytes:
        return hashlib.sha256(f"{seed}:{key}".encode()).digest()

    keys = sorted({q.key for q in questions if not q.split}, key=rank)
    num_test = max(1, round(test_share * len(keys))) if test_share and keys else 0
    if keys and num_test == len(keys):
        got = f"{test_share} of {len(keys)} different questions"
        fix = "give more questions, or --test_share 0 for no test file"
        raise ConfigError(explain("--test_share", got, "some questions for both sides", fix))
    test = set(keys[:num_test])
    sides = {False: "train", True: "test"}
    return [q if q.split else replace(q, split=sides[q.key in test]) for q in questions]


def select(questions: Iterable[Question], names: Sequence[str]) -> list[Question]:
    """The questions of the named sets, or of all for no names. Raises ConfigError."""
    questions = list(questions)
    known = sorted({question.data_source for question in questions})
    wrong = [name for name in names if name not in known]
    if wrong:
        fix = "correct the name, or leave the option out for all"
        expected = f"sets of the files: {', '.join(known)}"
        raise ConfigError(explain("--data_sources", ", ".join(wrong), expected, fix))
    return [question for question in questions if not names or question.data_source in names]


def _read_csv(path: Path, separator: str) -> Iterator[Record]:
    """Rows of a csv with their answers apart. Raises DataError for an unusable file."""
    try:
        with regular_file(path).open(encoding="utf-8-sig", newline="") as file:
            lines = iter(partial(file.readline, MAX_CHARS), "")  # csv refuses what is longer
            reader = csv.DictReader(lines, restkey="", strict=True)
            names = reader.fieldnames or ()
            answers = next((name for name in ANSWER_COLUMNS if name in names), None)
            if answers is None or "question" not in names:
                got = f"columns {', '.join(names) or '(none)'}"
                fix = "begin the file with the line question,answer"
                raise DataError(explain(str(path), got, "a header with question and answer", fix))
            number = -1
            for number, record in enumerate(reader):
                yield number, _csv_record(path, number, reader.line_num, record, answers, separator)
            if number < 0:
                fix = "add a line for each question"
                raise DataError(explain(str(path), "no rows", "at least one", fix))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        fix = "save it as csv in UTF-8, with quotes around fields that hold commas"
        raise DataError(explain(str(path), str(error), "a csv file", fix)) from error


def _csv_record(
    path: Path, number: int, line: int, record: dict[str, object], column: str, separator: str
) -> dict[str, object] | BadRow:
    """One row with its answers as a list; a row with too many fields is bad."""
    if "" in record:
        fix = f"put quotes around fields that hold commas (line {line})"
        got = f"further fields {record['']}"
        return BadRow.at(str(path), number, "", got, "as many fields as the header", fix)
    value = record[column]
    parts = value.split(separator) if isinstance(value, str) and separator else [value]
    answers = [part.strip() if isinstance(part, str) else part for part in parts]
    return {**record, column: answers}
