"""Builds question files and a corpus from a user's own files.

Questions come from csv, tsv, jsonl or parquet. A csv has a header with `question` and `answer`;
several accepted answers are in one field, divided by a separator. jsonl and parquet have `question`
and `golden_answers`, `answers` or `answer`. Rows with a `split` go to `<split>.parquet`, and of
several files, one such as `dev.jsonl` names the split of its rows without one; all other rows are
divided into `train.parquet` and `test.parquet`.
"""

import csv
import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

from search_r1.datasets.command import CorpusOptions, OwnOptions
from search_r1.datasets.question import (
    ALIAS_COLUMNS,
    ANSWER_COLUMNS,
    Question,
    RecordLocation,
    known_names,
    make_rows,
    missing_answer,
    missing_question,
    read_question,
    valid_questions,
    write_rows,
)
from search_r1.datasets.wording import PromptStyle, prompt_writer
from verl.data.records import MAX_ROW_CHARS, BadRow, Record, check_kind, short_repr
from verl.data.rows import read_records
from verl.data.values import MISSING_CELLS, is_structure
from verl.errors import ConfigError, DataError, explain
from verl.file_kinds import HEAD_BYTES
from verl.files import regular_file

logger = logging.getLogger(__name__)

DELIMITERS = (",", "\t", ";")
"""What may divide the columns of a csv."""
SPLIT_NAMES = ("train", "training", "dev", "val", "validation", "valid", "test")
"""Names of files that are the split of their rows, where several files are given."""
UNNAMED = "\0"
"""Beginning of the names of columns without one, which no header has."""


def build(options: OwnOptions) -> int:
    """Read all files, then write a parquet file for each split."""
    if not options.files:
        raise ConfigError(explain("FILE", "nothing", "csv, jsonl or parquet", "name one or more"))
    write_prompt = prompt_writer(PromptStyle.SEARCH, options.template_type)
    names = options.data_sources.split(",") if options.data_sources else ()
    all_questions = valid_questions(read_files(options), drop_bad=options.drop_bad_rows)
    chosen = select(all_questions, names)
    _check_splits(chosen)
    questions = assign_splits(chosen, options.test_share, options.seed)
    for split in sorted({question.split for question in questions}):
        of_split = [question for question in questions if question.split == split]
        rows = make_rows(of_split, write_prompt, split, keep_extra=True)
        write_rows(rows, options.local_dir / f"{split}.parquet")
    return 0


def build_corpus(options: CorpusOptions) -> int:
    """Write folders and files of texts as a corpus of passages. Raises SearchError."""
    from search_r1.datasets.texts import building, cutting  # noqa: PLC0415 - not for questions

    if not options.paths:
        expected = "folders or files of texts"
        raise ConfigError(explain("PATHS", "nothing", expected, "name one or more"))
    cutter = cutting.choose(
        options.max_words, options.chunk_size, options.tokenizer, options.chunk_overlap
    )
    count = building.write_corpus(
        options.paths, options.out, cutter, keep_rows=options.keep_rows,
        drop_bad=options.drop_bad_rows,
    )  # fmt: skip
    logger.info("%s: %d passages", options.out, count)
    return 0


def read_files(options: OwnOptions) -> Iterator[Question | BadRow]:
    """Yield the questions and bad rows of all files. Raises DataError."""
    for path in options.files:
        source, split = options.data_source or path.stem, options.split
        if len(options.files) > 1 and path.stem.lower() in SPLIT_NAMES:
            split = split or path.stem.lower()
        if path.suffix.lower() in (".csv", ".tsv"):
            records = _read_csv(path, options.answer_separator)
        else:
            records = read_records(str(path))
        for number, record in records:
            if number == 0 and isinstance(record, dict) and path.suffix.lower() == ".parquet":
                _check_names(path, list(record))
            yield read_question(record, RecordLocation(str(path), number, source, split))


def _check_splits(questions: Sequence[Question]) -> None:
    """Raise ConfigError if some files name a split, and questions of others are to be divided."""
    named = next((q.location.file for q in questions if q.location.split), None)
    divided = next((q.location.file for q in questions if not q.split), None)
    if named is not None and divided is not None:
        got = f"{divided} without splits beside {named}, whose name is one"
        expected = f"a split for all files or for none; names of splits: {', '.join(SPLIT_NAMES)}"
        fix = "rename one, build them apart with --split, or give their rows a column split"
        raise ConfigError(explain("FILE", got, expected, fix))


def assign_splits(
    questions: Sequence[Question], test_share: float, seed: int = 0
) -> list[Question]:
    """Assign questions without a split to `test` (the fraction `test_share`) or `train`.

    The split depends on the words of the question and the seed, not on the row, and questions with
    the same words get the same split. Raises ConfigError for a share that leaves a split empty.
    """

    def rank(key: str) -> bytes:
        return hashlib.sha256(f"{seed}:{key}".encode()).digest()

    keys = sorted({q.key for q in questions if not q.split}, key=rank)
    num_test = max(1, round(test_share * len(keys))) if test_share and keys else 0
    if keys and num_test == len(keys):
        got = f"{test_share} of {len(keys)} different questions"
        fix = "give more questions, or --test_share 0 for no test file"
        raise ConfigError(explain("--test_share", got, "questions for both splits", fix))
    test_keys = set(keys[:num_test])
    return [
        q if q.split else replace(q, split="test" if q.key in test_keys else "train")
        for q in questions
    ]


def select(questions: Sequence[Question], names: Sequence[str]) -> list[Question]:
    """Return the questions of the named sets, or all without names. Raises ConfigError."""
    known = sorted({question.data_source for question in questions})
    unknown = [name for name in names if name not in known]
    if unknown:
        fix = "correct the name, or leave the option out for all"
        expected = f"sets of the files: {', '.join(known)}"
        raise ConfigError(explain("--data_sources", ", ".join(unknown), expected, fix))
    return [question for question in questions if not names or question.data_source in names]


def _read_csv(path: Path, separator: str) -> Iterator[Record]:
    """Yield rows of a csv, with answers as lists. Raises DataError for an unusable file.

    Columns are divided by what divides the header: commas, tabs, or the semicolons of Excel where
    commas are in numbers.
    """
    csv.field_size_limit(MAX_ROW_CHARS)
    try:
        with regular_file(path).open("rb") as start:
            check_kind(str(path), start.read(HEAD_BYTES), form="csv in UTF-8")
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = _bounded_lines(path, file)
            first = next(lines, "")
            names, delimiter = _header(next(lines, "") if first[:4].lower() == "sep=" else first)
            _check_names(path, [name for name in names if name.strip()])
            names = [name or f"{UNNAMED}{n}" for n, name in enumerate(known_names(names))]
            answers = next(name for name in ANSWER_COLUMNS if name in names)
            reader = csv.DictReader(
                lines, names, restkey="", strict=True, delimiter=delimiter, skipinitialspace=True
            )
            number = -1
            for number, record in enumerate(reader):
                line = reader.line_num + 1
                yield number, _csv_record(path, number, line, record, answers, separator)
            if number < 0:
                fix = "add a line for each question"
                raise DataError(explain(str(path), "no rows", "at least one", fix))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        fix = "save it as csv in UTF-8, with quotes around fields that hold commas"
        if isinstance(error, UnicodeDecodeError):
            fix += f" (iconv -f windows-1252 -t utf-8 {path}, if it is from Windows)"
        raise DataError(explain(str(path), str(error), "a csv file", fix)) from error


def _header(line: str) -> tuple[list[str], str]:
    """Return the columns' names and what divides them."""
    found = {
        d: next(csv.reader([line], delimiter=d, skipinitialspace=True), []) for d in DELIMITERS
    }
    delimiter = max(DELIMITERS, key=lambda d: len(found[d]))
    return found[delimiter], delimiter


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Raise DataError unless there is a column of questions and one of answers, each once."""
    try:
        known = known_names(names)
    except ValueError as error:
        fix = "rename or drop one"
        raise DataError(explain(str(path), error, "each column once", fix)) from error
    if "question" not in known:
        raise DataError(explain(str(path), *missing_question(names)))
    if not set(known) & set(ANSWER_COLUMNS):
        raise DataError(explain(str(path), *missing_answer(names)))


def _bounded_lines(path: Path, file: TextIO) -> Iterator[str]:
    """Yield the lines of a csv. Raises DataError before one over `MAX_ROW_CHARS` is in memory."""
    for number, line in enumerate(iter(partial(file.readline, MAX_ROW_CHARS + 1), ""), 1):
        if len(line) > MAX_ROW_CHARS:
            got, fix = f"more than {MAX_ROW_CHARS} characters", "shorten it, or drop the row"
            raise DataError(explain(f"{path}, line {number}", got, "a shorter line", fix))
        yield line


def _csv_record(
    path: Path, number: int, line: int, record: dict[str, object], column: str, separator: str
) -> dict[str, object] | BadRow:
    """Return one row with a list of answers, or a bad row if it has too many fields."""
    unnamed = {name: record.pop(name) for name in list(record) if name.startswith(UNNAMED)}
    unnamed.pop(f"{UNNAMED}0", None)  # pandas writes the rows' numbers without a name
    further = record.get("", [value for value in unnamed.values() if value])
    if further:
        fix = f"put quotes around fields that hold commas (line {line})"
        got = f"further fields {short_repr(further)}"
        return BadRow.at(str(path), number, "", got, "as many fields as the header", fix)
    if path.suffix.lower() == ".tsv" and any(re.search("[\t\n]", str(v)) for v in record.values()):
        fix = f"double the quotation marks within fields, or drop them (up to line {line})"
        return BadRow.at(str(path), number, "", "a field over several", "a field a tab", fix)
    columns = (column, *(name for name in ALIAS_COLUMNS if name in record))
    return {**record, **{name: _split_answers(record[name], separator) for name in columns}}


def _split_answers(value: object, separator: str) -> object:
    """Return the answers of a field as a list."""
    if isinstance(value, str) and (value.strip() in MISSING_CELLS or is_structure(value)):
        return value  # `read_question` reads it, or says what is missing
    parts = value.split(separator) if isinstance(value, str) and separator else [value]
    return [part.strip() if isinstance(part, str) else part for part in parts]
