"""Question files become rows: parquet and jsonl in the Search-R1 format, checked one by one.

A row has `data_source`, `prompt` (chat messages or a plain string),
`reward_model.ground_truth.target`, and optionally `ability` and `extra_info`. Rows are numbered
from 0 within their file, and every complaint names file and row. Tokens are not known here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from verl.errors import DataError, explain

Message = Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """One checked row, before tokens."""

    file: str
    """The file as it is named in uids: its name, or its path where names collide."""
    number: int
    """From 0 within the file."""
    prompt: str | tuple[Message, ...]
    data_source: str
    ground_truth: tuple[str, ...]
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def uid(self) -> str:
        return f"{self.file}#{self.number}"


def file_list(files: str | Sequence[str]) -> list[str]:
    """An option such as `data.train_files` as a list of paths."""
    return [files] if isinstance(files, str) else [str(file) for file in files]


def load_rows(files: str | Sequence[str], prompt_key: str = "prompt") -> list[Row]:
    """Read and check every row of parquet or jsonl files, in order.

    Raises DataError for a file that is missing, unreadable, empty or given twice, and for the
    first malformed row, with its number.
    """
    paths = file_list(files)
    if not paths:
        raise DataError(explain("data files", "an empty list", "a file", "name a parquet file"))
    names = _unique_names(paths)
    return [
        _check_row(record, path, names[path], number, prompt_key)
        for path in paths
        for number, record in _read(path, prompt_key)
    ]


def _unique_names(paths: Sequence[str]) -> dict[str, str]:
    """A name for each path: the file's own, or the path where two files share that."""
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if list(paths).count(path) > 1)
        raise DataError(explain("data files", f"{twice} twice", "each file once", "drop one"))
    names = [Path(path).name for path in paths]
    return {p: n if names.count(n) == 1 else p for p, n in zip(paths, names, strict=True)}


def _read(path: str, prompt_key: str) -> Iterator[tuple[int, Any]]:
    """Raw rows of one file with their numbers. Raises DataError."""
    readers: dict[str, Callable[[str, str], Iterator[tuple[int, Any]]]] = {
        ".parquet": _read_parquet,
        ".jsonl": _read_jsonl,
    }
    reader = readers.get(Path(path).suffix)
    if reader is None:
        fix = "convert it, or correct its name"
        raise DataError(explain(path, Path(path).suffix or "no suffix", ".parquet or .jsonl", fix))
    if not Path(path).is_file():
        fix = "correct the path, or get the file (README: data; make data builds the example)"
        raise DataError(explain(path, "no such file", "a file of questions", fix))
    empty = True
    for numbered in reader(path, prompt_key):
        empty = False
        yield numbered
    if empty:
        raise DataError(explain(path, "no rows", "at least one", "build the file again"))


def _read_parquet(path: str, prompt_key: str) -> Iterator[tuple[int, Any]]:
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        fix = "download or build it again"
        raise DataError(explain(path, str(error).split("\n")[0], "a parquet file", fix)) from error
    for column in (prompt_key, "data_source", "reward_model"):
        if column not in table.column_names:
            got = f"columns {', '.join(table.column_names)}"
            fix = "see docs/configuration.md for the row format (data.prompt_key renames prompt)"
            raise DataError(explain(path, got, f"a column {column}", fix))
    start = 0
    for batch in table.to_batches(max_chunksize=4096):
        yield from enumerate(batch.to_pylist(), start)
        start += batch.num_rows


def _read_jsonl(path: str, prompt_key: str) -> Iterator[tuple[int, Any]]:
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                fix = f"correct line {number + 1}"
                raise _row_error(path, number, "", str(error), "a JSON object", fix) from error


def _row_error(
    file: str, number: int, part: str, got: object, expected: str, fix: str
) -> DataError:
    where = f"{file}, row {number} (counted from 0)"
    return DataError(explain(f"{where}, {part}" if part else where, got, expected, fix))


def _check_row(record: Any, path: str, name: str, number: int, prompt_key: str) -> Row:
    """One raw row of `path` as a Row of `name`, or a DataError that names the part at fault."""

    def refuse(part: str, got: object, expected: str) -> DataError:
        return _row_error(path, number, part, _short(got), expected, "correct or drop the row")

    if not isinstance(record, dict):
        raise refuse("", record, "an object")
    source = record.get("data_source")
    if not isinstance(source, str) or not source:
        raise refuse("data_source", source, "a name")
    prompt = _prompt(record.get(prompt_key))
    if not prompt:
        expected = "a string, or a list of messages {role, content} that is not empty"
        raise refuse(prompt_key, record.get(prompt_key), expected)
    targets = _targets(record.get("reward_model"))
    if not targets:
        expected = "reward_model.ground_truth.target: a string or a list of strings"
        raise refuse("reward_model", record.get("reward_model"), expected)
    extra = record.get("extra_info") or {}
    if not isinstance(extra, dict):
        raise refuse("extra_info", extra, "an object")
    return Row(name, number, prompt, source, targets, extra)


def _prompt(prompt: Any) -> str | tuple[Message, ...]:
    """The prompt as text or messages with role and content; empty where it is neither."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        return ()
    sound = all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in prompt
    )
    return tuple(prompt) if sound else ()


def _targets(reward_model: Any) -> tuple[str, ...]:
    """The accepted answers, or () where there is none in the expected form."""
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    target = truth.get("target") if isinstance(truth, dict) else None
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, list) or not all(isinstance(t, str) and t for t in targets):
        return ()
    return tuple(targets)


def _short(value: object, limit: int = 80) -> str:
    """A value for an error message."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
