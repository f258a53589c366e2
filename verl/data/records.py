"""Files of raw rows, numbered from 0: parquet and jsonl, read one row at a time.

What a row must hold is not known here; `verl.data.rows` checks questions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from verl.errors import DataError, explain

ROWS_AT_ONCE = 4096
"""Parquet rows that are Python objects at one time."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and why."""

    file: str
    number: int
    """From 0 within the file; in jsonl the line, blank ones counted."""
    problem: str
    """For the user: file, row, what was got, what was expected, and the fix."""

    @classmethod
    def at(
        cls, file: str, number: int, part: str, got: object, expected: str, fix: str = ""
    ) -> BadRow:
        """The complaint about one `part` of a row ("" for all of it)."""
        where = f"{file}, row {number} (counted from 0)"
        where = f"{where}, {part}" if part else where
        fix = fix or "correct or drop the row"
        return cls(file, number, explain(where, got, expected, fix))


Record = tuple[int, Any]
"""A row's number, and its content or what is wrong with it (`BadRow`)."""


def read_records(path: str, columns: Sequence[str] = ()) -> Iterator[Record]:
    """Rows of a parquet or jsonl file, in order; a line that is no JSON comes as a `BadRow`.

    Raises DataError for a file that is missing, unreadable, of another kind or empty, and for a
    parquet file without one of `columns`.
    """
    readers: dict[str, Callable[[str, Sequence[str]], Iterator[Record]]] = {
        ".parquet": _read_parquet,
        ".jsonl": _read_jsonl,
    }
    reader = readers.get(Path(path).suffix)
    if reader is None:
        fix = "convert it, or correct its name"
        raise DataError(explain(path, Path(path).suffix or "no suffix", ".parquet or .jsonl", fix))
    if not Path(path).is_file():
        fix = "correct the path, or get the file (docs/data.md; example/data has some)"
        raise DataError(explain(path, "no such file", "a file of questions", fix))
    empty = True
    for record in reader(path, columns):
        empty = False
        yield record
    if empty:
        raise DataError(explain(path, "no rows", "at least one", "build the file again"))


def short(value: object, limit: int = 80) -> str:
    """A value for an error message."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _read_parquet(path: str, columns: Sequence[str]) -> Iterator[Record]:
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        fix = "download or build it again"
        raise DataError(explain(path, str(error).split("\n")[0], "a parquet file", fix)) from error
    for column in columns:
        if column not in table.column_names:
            got = f"columns {', '.join(table.column_names)}"
            fix = "see docs/data.md for the row format (data.prompt_key renames prompt)"
            raise DataError(explain(path, got, f"a column {column}", fix))
    start = 0
    for batch in table.to_batches(max_chunksize=ROWS_AT_ONCE):
        yield from enumerate(batch.to_pylist(), start)
        start += batch.num_rows


def _read_jsonl(path: str, columns: Sequence[str]) -> Iterator[Record]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except ValueError as error:  # no JSON, or not UTF-8
                fix = f"correct line {number + 1}"
                bad = BadRow.at(path, number, "", str(error), "a JSON object in UTF-8", fix)
                yield number, bad
