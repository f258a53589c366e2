"""Question files become rows: parquet and jsonl in the format of the original, checked one by one.

A row has `data_source`, `prompt` (chat messages or a plain string), `reward_model.ground_truth`
(the accepted answers, or `{"target": …}`), and optionally `ability` and `extra_info`. Rows are
numbered from 0 within their file, and every complaint names file and row. Tokens are not known
here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.data.records import BadRow, read_records, short
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
    rows = []
    for row in scan_rows(files, prompt_key):
        if isinstance(row, BadRow):
            raise DataError(f"{row.problem} (all of them: python -m verl.data validate {row.file})")
        rows.append(row)
    return rows


def scan_rows(files: str | Sequence[str], prompt_key: str = "prompt") -> Iterator[Row | BadRow]:
    """Every row of the files in order, or what is wrong with it, so that all faults can be told.

    Raises DataError as `load_rows` does for a file that cannot be used at all.
    """
    paths = file_list(files)
    if not paths:
        raise DataError(explain("data files", "an empty list", "a file", "name a parquet file"))
    names = _unique_names(paths)
    for path in paths:
        for number, record in read_records(path, (prompt_key, "data_source", "reward_model")):
            if isinstance(record, BadRow):
                yield record
            else:
                yield _check_row(record, path, names[path], number, prompt_key)


def _unique_names(paths: Sequence[str]) -> dict[str, str]:
    """A name for each path: the file's own, or the path where two files share that."""
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if list(paths).count(path) > 1)
        raise DataError(explain("data files", f"{twice} twice", "each file once", "drop one"))
    names = [Path(path).name for path in paths]
    return {p: n if names.count(n) == 1 else p for p, n in zip(paths, names, strict=True)}


def _check_row(record: Any, path: str, name: str, number: int, prompt_key: str) -> Row | BadRow:
    """One raw row of `path` as a Row of `name`, or the part at fault."""

    def refuse(part: str, got: object, expected: str) -> BadRow:
        return BadRow.at(path, number, part, short(got), expected)

    if not isinstance(record, dict):
        return refuse("", record, "an object")
    source = record.get("data_source")
    if not isinstance(source, str) or not source:
        return refuse("data_source", source, "a name")
    prompt = _prompt(record.get(prompt_key))
    if not prompt:
        expected = "a string, or a list of messages {role, content} that is not empty"
        return refuse(prompt_key, record.get(prompt_key), expected)
    targets = _targets(record.get("reward_model"))
    if not targets:
        expected = "ground_truth, or its target: a string or a list of strings, none empty"
        return refuse("reward_model", record.get("reward_model"), expected)
    extra = record.get("extra_info") or {}
    if not isinstance(extra, dict):
        return refuse("extra_info", extra, "an object")
    if isinstance(record.get("question"), str):  # where the original's files keep it
        extra = {"question": record["question"], **extra}
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
    """The accepted answers, or () where there is none in the expected form.

    veRL's own data builders write `ground_truth` as plain text, the original's as `{"target": …}`.
    """
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    target = truth.get("target") if isinstance(truth, dict) else truth
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, list) or not all(isinstance(t, str) and t for t in targets):
        return ()
    return tuple(targets)
