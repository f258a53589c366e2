"""Records of question files before they are checked: bad rows, bounds, and the reader of jsonl.

Parquet is read in `verl.data.parquet`; `verl.data.rows` chooses the reader and checks the rows.
"""

import json
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

from verl.errors import DataError, explain, shortened
from verl.file_kinds import HEAD_BYTES, describe_other

MAX_ROW_CHARS = 2**24
"""Longest row that is read, in bytes of its text. A prompt of a million tokens has a quarter."""
SKIP_BYTES = 2**20
"""Bytes that are read at a time of a line that is too long."""
MAX_QUOTE = 200
"""Longest quotation of a row in a message, in characters."""


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and the reason."""

    file: str
    number: int
    """Row number within the file, from 0; in jsonl the line number, including blank lines."""
    problem: str
    """Error message for the user: file, row, what was got, what was expected, and the fix."""

    @classmethod
    def at(
        cls, file: str, number: int, part: str, got: object, expected: str, fix: str = ""
    ) -> Self:
        """Return the error about one `part` of a row ("" for the whole row)."""
        where = f"{file}, row {number} (counted from 0){f', {part}' if part else ''}"
        got = shortened(got, MAX_QUOTE)
        return cls(file, number, explain(where, got, expected, fix or "correct or drop the row"))

    @classmethod
    def too_long(cls, file: str, number: int, part: str, got: str) -> Self:
        """Return the error about a row over `MAX_ROW_CHARS`."""
        expected = f"at most {MAX_ROW_CHARS} characters in a row"
        return cls.at(file, number, part, got, expected, "shorten it, or drop the row")


Record = tuple[int, Any]
"""A row's number, and its content, which is a `BadRow` if it cannot be used."""

_QUOTE = reprlib.Repr()
_QUOTE.maxstring = _QUOTE.maxother = _QUOTE.maxlong = 100
_QUOTE.maxlist = _QUOTE.maxtuple = _QUOTE.maxdict = 10


def short_repr(value: object) -> str:
    """Return the repr of a value for an error message, cut to 80 characters.

    A long value is cut before its repr is made, which would take as long as reading it.
    """
    return "nothing" if value is None else shortened(_QUOTE.repr(value), 80)


def check_kind(path: str, head: bytes, form: str = "jsonl") -> None:
    """Raise DataError if a file with this beginning is not of a form, with what converts it."""
    if problem := describe_other(Path(path), head, "questions", form):
        raise DataError(f"{path}: {problem}")


def missing_column(path: str, names: Iterable[str], column: str) -> tuple[str, str, str]:
    """Return got, expected and fix of an error about a column that a file of rows lacks."""
    names = [str(name) for name in names]
    got = f"columns {shortened(', '.join(names), MAX_QUOTE - 20)}"
    folded = {name.strip().lower() for name in names}
    similar = next((name for name in names if name.strip().lower() == column.lower()), None)
    if similar is not None:
        fix = f"rename {short_repr(similar)} to {column}"
    elif "question" in folded and "prompt" not in folded:
        fix = f"build rows: python scripts/data_process/own_questions.py {path}"
    elif "messages" in folded and column != "data_source":
        fix = "put the messages before the answer into prompt, and the answer into reward_model"
    else:
        fix = "see docs/guides/data.md for the row format"
    return got, f"a column {column}", fix


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of JSON pairs. Raises ValueError for a key that occurs twice."""
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {short_repr(twice)} twice")
    return record


def read_jsonl(path: str, max_bytes: int = MAX_ROW_CHARS) -> Iterator[Record]:
    """Yield (line number from 0, row) of a jsonl file, without blank lines.

    A line over `max_bytes` is a `BadRow` and is not kept in memory. Raises DataError, also for
    a file that is no jsonl.
    """
    try:
        with open(path, "rb") as lines:
            check_kind(path, lines.read(HEAD_BYTES))
            lines.seek(0)
            for number, line in enumerate(iter(partial(lines.readline, max_bytes + 1), b"")):
                if len(line) > max_bytes and not line.endswith(b"\n"):
                    num_bytes = len(line) + _skip_line(lines)
                    yield number, BadRow.too_long(path, number, "", f"{num_bytes} bytes")
                elif line.strip():
                    yield number, _parse_line(path, number, line)
    except OSError as error:
        fix = "correct the path or its permissions"
        raise DataError(explain(path, error, "a readable file", fix)) from error


def _skip_line(lines: BinaryIO) -> int:
    """Read to the end of the line and return the number of bytes."""
    num_bytes = 0
    for part in iter(partial(lines.readline, SKIP_BYTES), b""):
        num_bytes += len(part)
        if part.endswith(b"\n"):
            break
    return num_bytes


def _parse_line(path: str, number: int, line: bytes) -> Any:
    try:
        row = json.loads(line, object_pairs_hook=unique_keys)
        if rb"\u" in line:  # JSON escapes can denote half a character, which UTF-8 cannot encode
            json.dumps(row, ensure_ascii=False).encode()
        return row
    except (ValueError, RecursionError) as error:  # invalid JSON, not UTF-8, or nested too deep
        fix = f"correct line {number + 1}"
        if isinstance(error, UnicodeDecodeError):
            fix = "save the file in UTF-8 (iconv -f windows-1252 -t utf-8, if it is from Windows)"
        return BadRow.at(path, number, "", str(error), "a JSON object in UTF-8", fix)
