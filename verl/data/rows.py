"""Reading and checking of question files: parquet or jsonl in the Search-R1 row format.

A row has `data_source`, `prompt` (chat messages or a plain string), `reward_model.ground_truth`
(the accepted answers, or `{"target": …}`), and optionally `ability` and `extra_info`. Rows are
numbered from 0 within their file, and every error names file and row. `read_records` reads rows of
any format. This module needs no tokenizer.
"""

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl.data.parquet import read_parquet
from verl.data.records import (
    BadRow,
    Record,
    check_kind,
    missing_column,
    read_jsonl,
    short_repr,
)
from verl.data.values import (
    MISSING_CELLS,
    Unreadable,
    is_structure,
    parse_messages,
    parse_structure,
    read_answers,
)
from verl.errors import DataError, explain
from verl.file_kinds import HEAD_BYTES

MAX_NAME = 200
"""Longest name of a data set, in characters."""
SUFFIX = re.compile(r"\.[A-Za-z]{2,7}\Z")
"""End of a file's name, which a data set's name has not."""
Message = Mapping[str, str]


@dataclass(frozen=True)
class Row:
    """One checked row, not yet tokenised."""

    file: str
    """The file in uids: its name, or its path if two files have the same name."""
    number: int
    """Row number within the file, from 0."""
    prompt: str | tuple[Message, ...]
    data_source: str
    ground_truth: tuple[str, ...]
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    row_truth: Any = None
    """The ground truth as the file has it, as in `verl.types.Prompt`."""

    @property
    def uid(self) -> str:
        return f"{self.file}#{self.number}"


def file_list(files: str | Sequence[str]) -> list[str]:
    """Return the paths of an option such as `data.train_files`; of a data set of the hub, its file.

    Raises DataError if the hub does not have or give it.
    """
    names = [files] if isinstance(files, str) else [str(file) for file in files]
    return [_from_hub(name) if is_on_hub(name) else name for name in names]


def is_on_hub(name: str) -> bool:
    """Whether a text can only be the name of a data set: `OWNER/NAME`, and perhaps a split."""
    owner, slash, rest = name.partition("/")
    is_path = os.path.exists(name) or owner in ("", ".", "..", "~") or "/" in rest
    return bool(slash and rest) and not is_path and not SUFFIX.search(name)


def _from_hub(name: str) -> str:
    from verl.data.from_hub import local_file  # noqa: PLC0415 - the hub's library, by name only

    return local_file(name)


def load_rows(
    files: str | Sequence[str], prompt_key: str = "prompt", columns: Collection[str] = ()
) -> list[Row]:
    """Read and check every row of parquet or jsonl files, in order.

    Further `columns`, where a row has them, are added to its `extra_info`. Raises DataError for a
    file that is missing, unreadable, empty or given twice, and for the first malformed row, with
    its number.
    """
    rows = []
    for row in scan_rows(files, prompt_key, columns):
        if isinstance(row, BadRow):
            raise DataError(f"{row.problem} (all of them: python -m verl.data validate {row.file})")
        rows.append(row)
    return rows


def scan_rows(
    files: str | Sequence[str], prompt_key: str = "prompt", columns: Collection[str] = ()
) -> Iterator[Row | BadRow]:
    """Yield every row of the files in order, malformed ones as `BadRow`, so that all can be listed.

    `columns` are those of `load_rows`. Raises DataError for a file that cannot be used at all, as
    that does.
    """
    paths = file_list(files)
    if not paths:
        raise DataError(explain("data files", "an empty list", "a file", "name a parquet file"))
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise DataError(explain("data files", f"{twice} twice", "each file once", "drop one"))
    names = [Path(path).name for path in paths]
    for path, name in zip(paths, names, strict=True):
        shown = name if names.count(name) == 1 else path
        required = (prompt_key, "data_source", "reward_model")
        wanted = (*required, "extra_info", "question", *columns)
        for number, record in read_records(path, required, wanted):
            if isinstance(record, BadRow):
                yield record
            else:
                row = check_row(record, path, shown, number, prompt_key)
                further = {name: record[name] for name in columns if name in record}
                if further and isinstance(row, Row):
                    row = replace(row, extra_info={**row.extra_info, **further})
                yield row


def read_records(
    path: str, required: Sequence[str] = (), wanted: Sequence[str] | None = None
) -> Iterator[Record]:
    """Yield the rows of a parquet or jsonl file in order, unreadable ones as `BadRow`.

    Of a parquet file, the columns `wanted` are read, or all. Raises DataError for a file that is
    missing, unreadable, empty or in another format, and for a parquet file that lacks one of the
    `required` columns.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".parquet", ".jsonl"):
        fix = "convert it, or correct its name"
        if suffix in (".csv", ".tsv"):
            fix = f"build rows: python scripts/data_process/own_questions.py {path}"
        elif os.path.isfile(path):
            with open(path, "rb") as start:
                check_kind(path, start.read(HEAD_BYTES))
        raise DataError(explain(path, suffix or "no suffix", ".parquet or .jsonl", fix))
    if not os.path.isfile(path):  # unlike Path.is_file, it accepts any text
        got = "not a regular file" if os.path.exists(path) else "no such file"
        fix = "correct the path, or get the file (docs/guides/data.md; example/data has some)"
        raise DataError(explain(path, got, "a file of questions", fix))
    is_empty = True
    is_parquet = suffix == ".parquet"
    for record in read_parquet(path, required, wanted) if is_parquet else read_jsonl(path):
        is_empty = False
        yield record
    if is_empty:
        raise DataError(explain(path, "no rows", "at least one", "build the file again"))


def check_row(
    record: Any, path: str, name: str, number: int, prompt_key: str = "prompt"
) -> Row | BadRow:
    """Convert a raw row of `path` to a `Row` of the file `name`, or return a `BadRow`."""
    if not isinstance(record, dict):
        return BadRow.at(path, number, "", short_repr(record), "an object")
    for column in (prompt_key, "data_source", "reward_model"):
        if column not in record:
            got, expected, fix = missing_column(path, record, column)
            return BadRow.at(path, number, "", got, expected, fix)
    source = record["data_source"]
    extra, reward_model = (_parse_object(record.get(n)) for n in ("extra_info", "reward_model"))
    prompt, targets = parse_prompt(record[prompt_key]), _parse_targets(reward_model)
    for part, is_valid, expected, fix in (
        ("data_source", _is_name(source), f"a name of at most {MAX_NAME} characters", ""),
        (prompt_key, prompt,
         "a string, or a list of messages {role, content} that is not empty",
         "write each message with a role and a content that are text"),
        (prompt_key, not ends_with_answer(prompt),
         "messages before the answer", "drop the assistant's message at the end"),
        ("reward_model", targets,
         "ground_truth, or its target: an answer or a list of answers as text, none empty or nan",
         'write ground_truth as {"target": [texts]}, or drop the row'),
        ("extra_info", isinstance(extra, dict), "an object", ""),
    ):  # fmt: skip
        if not is_valid:
            return BadRow.at(path, number, part, short_repr(record.get(part)), expected, fix)
    if isinstance(record.get("question"), str):  # a column of the original Search-R1 files
        extra = {"question": record["question"], **extra}
    truth = _row_truth(reward_model["ground_truth"], targets)
    return Row(name, number, prompt, source, targets, extra, truth)


def ends_with_answer(prompt: str | tuple[Message, ...]) -> bool:
    """Whether messages end with the assistant's, after which a policy has nothing to answer."""
    return not isinstance(prompt, str) and bool(prompt) and prompt[-1]["role"] == "assistant"


def _is_name(source: Any) -> bool:
    """Whether a value can name a data set in metrics and reports, which a list as text cannot."""
    is_text = isinstance(source, str) and source.isprintable() and 0 < len(source) <= MAX_NAME
    return is_text and not is_structure(source)


def _parse_object(value: Any) -> Any:
    """Return an object, also one saved as text; {} for a missing one, other values unchanged."""
    if not value or (isinstance(value, float) and math.isnan(value)):
        return {}
    if not isinstance(value, str):
        return value
    if value.strip() in MISSING_CELLS:
        return {}
    try:
        return parse_structure(value)
    except Unreadable:
        return None


def _row_truth(truth: Any, answers: Sequence[str]) -> Any:
    """Return a valid ground truth of a row, or None if it has nothing but its target's answers."""
    truth = _read_text(truth)
    if isinstance(truth, dict) and "target" in truth:
        truth = {**truth, "target": _read_text(truth["target"])}
    return None if truth == {"target": list(answers)} else truth


def _read_text(value: Any) -> Any:
    """Return a list or object that was saved as text. Raises Unreadable for a damaged one."""
    structure = parse_structure(value) if isinstance(value, str) else None
    return value if structure is None else structure


def parse_prompt(prompt: Any) -> str | tuple[Message, ...]:
    """Return a prompt as text or as messages with role and content; empty if it is neither.

    Messages that were saved as text are read (`verl.data.values`).
    """
    if isinstance(prompt, str):
        if prompt.strip() in MISSING_CELLS:
            return ()
        try:
            prompt = parse_messages(prompt)
        except Unreadable:
            return ()
        if isinstance(prompt, str):
            return prompt
    if not isinstance(prompt, list) or not prompt:
        return ()
    is_valid = all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in prompt
    )
    return tuple(prompt) if is_valid else ()


def _parse_targets(reward_model: Any) -> tuple[str, ...]:
    """Return the accepted answers, or () if they are not in the expected form."""
    truth = reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    try:
        read = _read_text(truth)
    except Unreadable:
        return ()
    # Builders of veRL write `ground_truth` as plain text, those of Search-R1 as `{"target": …}`.
    has_target = isinstance(read, dict) and (read is truth or "target" in read)
    target = read.get("target") if has_target else truth
    if isinstance(target, dict):
        return ()
    return parse_targets(target)


def parse_targets(target: Any) -> tuple[str, ...]:
    """Return the answers of a text or list, also of one saved as text; () if it is neither."""
    if isinstance(target, list) and not all(isinstance(t, str) and t.strip() for t in target):
        return ()
    try:
        return read_answers(target)
    except Unreadable:
        return ()
