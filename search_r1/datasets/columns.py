"""Adds columns to question files: which files, their questions, and the files with the columns.

Files are parquet or jsonl, with rows of question files or raw questions with their answers.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from search_r1.agent.question import question_of
from search_r1.datasets.question import Question, RecordLocation, read_question
from verl.data.records import BadRow
from verl.data.rows import Row, check_row, read_records
from verl.errors import ConfigError, DataError, explain
from verl.files import atomic_write

logger = logging.getLogger(__name__)

Columns = Mapping[str, str | int | float | None]
"""New values of a row."""
ALL_ROWS = "all rows"
"""The last row of a table by set."""


def targets(files: Sequence[Path], folder: Path) -> dict[Path, Path]:
    """Return the file to write for each file to read. Raises ConfigError before any work."""
    if not files:
        raise ConfigError(explain("FILE", "nothing", "parquet or jsonl", "name one or more"))
    found = {path: folder / path.name for path in files}
    if len(set(found.values())) < len(files):
        got = f"two files of one name among {', '.join(map(str, files))}"
        raise ConfigError(explain("FILE", got, "different names", "one after the other"))
    for path, target in found.items():
        if target.resolve() == path.resolve():
            fix = "another --local_dir, which keeps the file as it was"
            raise ConfigError(explain("--local_dir", target, "a new file", fix))
    return found


def read_questions(path: Path) -> list[Question]:
    """Read the rows of a question file, or raw questions. Raises DataError for a bad row."""
    questions = []
    for question in _questions(path):
        if isinstance(question, BadRow):
            raise DataError(question.problem)
        questions.append(question)
    return questions


def _questions(path: Path) -> Iterator[Question | BadRow]:
    for number, record in read_records(str(path)):
        location = RecordLocation(str(path), number, path.stem, "")
        if isinstance(record, dict) and {"prompt", "reward_model"} <= record.keys():
            yield _question_of_row(check_row(record, str(path), path.name, number), location)
        else:
            yield read_question(record, location)


def _question_of_row(row: Row | BadRow, location: RecordLocation) -> Question | BadRow:
    if isinstance(row, BadRow):
        return row
    if not (text := question_of(row)):
        got = row.extra_info.get("question")
        expected, fix = "the question alone, beside the prompt", "add a column question"
        return BadRow.at(location.file, row.number, "extra_info.question", got, expected, fix)
    return Question(row.uid, text, row.ground_truth, row.data_source, "", location)


def write_columns(
    path: Path, target: Path, columns: Sequence[Columns], types: Mapping[str, pyarrow.DataType]
) -> None:
    """Write the rows of a file with new columns of these types, in the same format."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as part:
        if path.suffix.lower() == ".parquet":
            rows = pyarrow.parquet.read_table(path)
            for name, kind in types.items():
                values = pyarrow.array([column[name] for column in columns], kind)
                if name in rows.column_names:
                    rows = rows.drop_columns([name])
                rows = rows.append_column(name, values)
            pyarrow.parquet.write_table(rows, part)
        else:
            with part.open("w", encoding="utf-8") as file:
                for (_, record), values in zip(_records(path), columns, strict=True):
                    file.write(json.dumps({**record, **values}, ensure_ascii=False) + "\n")
    logger.info("%s: %d rows", target, len(columns))


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, row in read_records(str(path)):
        assert isinstance(row, dict), "bad rows were refused when they were read"
        yield number, row


def by_set(data_sources: Sequence[str]) -> dict[str, list[int]]:
    """Return the numbers of the rows of each set and, if there are several, of all."""
    sets = {name: [i for i, source in enumerate(data_sources) if source == name]
            for name in sorted(set(data_sources))}  # fmt: skip
    return sets | ({ALL_ROWS: list(range(len(data_sources)))} if len(sets) > 1 else {})
