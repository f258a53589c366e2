"""Question files become prompts, and prompts come in batches: reading, rendering, sampling.

A row has the Search-R1 format: `data_source`, `prompt` (chat messages or a plain string),
`reward_model.ground_truth.target`, and optionally `ability` and `extra_info`. Rows are numbered
from 0 within their file, and every complaint names file and row. No search, no Ray here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
import pyarrow
import pyarrow.parquet

from verl.errors import ConfigError, DataError, explain
from verl.protocol import Prompt

logger = logging.getLogger(__name__)

Message = Mapping[str, str]


class Tokenizer(Protocol):
    """What rendering needs of a Hugging Face tokenizer."""

    @property
    def chat_template(self) -> Any: ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


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
        _check_row(record, names[path], number, prompt_key)
        for path in paths
        for number, record in _read(path, prompt_key)
    ]


def choose(rows: Sequence[Row], num_rows: int | None, seed: int) -> list[Row]:
    """`num_rows` rows chosen by seed, in file order; all of them for None or a larger number."""
    if num_rows is None or num_rows >= len(rows):
        return list(rows)
    chosen = np.random.default_rng(seed).permutation(len(rows))[:num_rows]
    return [rows[i] for i in sorted(chosen.tolist())]


def render(row: Row, tokenizer: Tokenizer) -> Prompt:
    """The row as token ids to generate from.

    Messages go through the tokenizer's chat template, with the header of the assistant's turn;
    a tokenizer without template gets their contents joined by newlines, and a plain string is
    taken as it is. Templates write their own special tokens; plain text gets the tokenizer's.
    """
    templated = not isinstance(row.prompt, str) and bool(tokenizer.chat_template)
    if isinstance(row.prompt, str):
        text = row.prompt
    elif templated:
        messages = [dict(message) for message in row.prompt]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = "\n".join(message["content"] for message in row.prompt)
    ids = tokenizer.encode(text, add_special_tokens=not templated)
    return Prompt(row.uid, tuple(ids), row.data_source, row.ground_truth, row.extra_info)


class PromptDataset(Sequence[Prompt]):
    """Prompts that fit the budget, in file order."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._prompts = list(prompts)

    @classmethod
    def load(
        cls,
        files: str | Sequence[str],
        tokenizer: Tokenizer,
        *,
        max_start_length: int,
        num_rows: int | None = None,
        seed: int = 0,
        prompt_key: str = "prompt",
        filter_overlong: bool = True,
    ) -> PromptDataset:
        """Read, choose, render, and leave out (or refuse) prompts over `max_start_length` tokens.

        Raises DataError for malformed rows, for over-long ones if they are not to be filtered,
        and when none is left.
        """
        rows = choose(load_rows(files, prompt_key), num_rows, seed)
        prompts = [render(row, tokenizer) for row in rows]
        kept = [prompt for prompt in prompts if len(prompt.ids) <= max_start_length]
        if len(kept) < len(prompts):
            _report_overlong(prompts, max_start_length, filter_overlong and bool(kept))
        return cls(kept)

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        return self._prompts[index]

    def batches(self, batch_size: int) -> Iterator[list[Prompt]]:
        """Every prompt once, in order; the last batch may be smaller (for validation)."""
        for start in range(0, len(self), batch_size):
            yield self._prompts[start : start + batch_size]


def _report_overlong(prompts: Sequence[Prompt], limit: int, may_drop: bool) -> None:
    """Log the count of over-long prompts, or refuse them with their rows."""
    overlong = [prompt for prompt in prompts if len(prompt.ids) > limit]
    longest = max(len(prompt.ids) for prompt in overlong)
    count = f"{len(overlong)} of {len(prompts)} prompts over {limit} tokens (longest {longest})"
    if may_drop:
        logger.warning("left out %s: data.max_start_length=%d", count, limit)
        return
    first = ", ".join(prompt.uid for prompt in overlong[:5])
    fix = f"raise data.max_start_length to {longest}, or shorten these rows"
    raise DataError(explain("data.max_start_length", f"{count}: {first}", "prompts that fit", fix))


class PromptSampler:
    """Batches of row numbers without end, in an order that depends on seed and epoch only.

    Rows are never dropped: a last, partial batch is completed from the next epoch's permutation.
    So that no batch holds a row twice, rows of that partial batch come later in the next epoch.
    With `shuffle` false every epoch is in file order.
    """

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool = True, seed: int = 0) -> None:
        if batch_size > num_rows:
            expected = f"at most the {num_rows} rows there are"
            fix = f"data.train_batch_size={num_rows}, or give more rows"
            raise ConfigError(explain("data.train_batch_size", batch_size, expected, fix))
        self.num_rows = num_rows
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._seek(0, 0)

    def num_batches(self, num_epochs: int) -> int:
        """Batches until each row was seen `num_epochs` times or more."""
        return -(-self.num_rows * num_epochs // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield self.next_batch()

    def next_batch(self) -> list[int]:
        """`batch_size` different row numbers."""
        batch = self._order[self._position : self._position + self.batch_size]
        self._position += len(batch)
        if self._position == self.num_rows:
            self._epoch += 1
            self._position = self.batch_size - len(batch)
            self._order = self._epoch_order(self._epoch, batch if self._position else [])
            batch = batch + self._order[: self._position]
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the next batch starts."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where a sampler of the same rows and batch size stood. Raises ConfigError."""
        for name in ("num_rows", "batch_size"):
            if state[name] != getattr(self, name):
                fix = "resume with the data and data.train_batch_size of the checkpoint"
                got = f"{getattr(self, name)} {name}"
                raise ConfigError(explain("resumed data order", got, str(state[name]), fix))
        self._seek(state["epoch"], state["position"])

    def _seek(self, epoch: int, position: int) -> None:
        """Rebuild the order of `epoch`, which depends on the tails of the epochs before."""
        order: list[int] = []
        for number in range(epoch + 1):
            tail_length = self.num_rows * number % self.batch_size
            tail = order[self.num_rows - tail_length :] if number else []
            order = self._epoch_order(number, tail)
        self._epoch, self._position, self._order = epoch, position, order

    def _epoch_order(self, epoch: int, tail: Sequence[int]) -> list[int]:
        """The epoch's permutation; rows of `tail` are swapped out of the batch they began."""
        if not self._shuffle:
            return list(range(self.num_rows))
        order = np.random.default_rng([self._seed, epoch]).permutation(self.num_rows).tolist()
        held = set(tail)
        head = self.batch_size - len(held) if held else 0
        free = (i for i in range(head, self.num_rows) if order[i] not in held)
        for i in range(head):
            if order[i] in held:
                j = next(free)
                order[i], order[j] = order[j], order[i]
        return [int(row) for row in order]


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
        fix = "correct data.train_files / data.val_files, or build the file (see README)"
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


def _check_row(record: Any, file: str, number: int, prompt_key: str) -> Row:
    """One raw row as a Row, or a DataError that names the part at fault."""

    def refuse(part: str, got: object, expected: str) -> DataError:
        return _row_error(file, number, part, _short(got), expected, "correct or drop the row")

    if not isinstance(record, dict):
        raise refuse("", record, "an object")
    source = record.get("data_source")
    if not isinstance(source, str) or not source:
        raise refuse("data_source", source, "a name")
    prompt = record.get(prompt_key)
    if not _is_prompt(prompt):
        expected = "a string, or a list of messages {role, content} that is not empty"
        raise refuse(prompt_key, prompt, expected)
    targets = _targets(record.get("reward_model"))
    if not targets:
        expected = "reward_model.ground_truth.target: a string or a list of strings"
        raise refuse("reward_model", record.get("reward_model"), expected)
    extra = record.get("extra_info") or {}
    if not isinstance(extra, dict):
        raise refuse("extra_info", extra, "an object")
    return Row(
        file, number, prompt if isinstance(prompt, str) else tuple(prompt), source, targets, extra
    )


def _is_prompt(prompt: Any) -> bool:
    """A non-empty string, or a non-empty list of messages with role and content."""
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in prompt
    )


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
