"""A report about question files: bad rows, prompt lengths, what a budget leaves out, one prompt.

An error in one row or file hides no other; `verl.data.__main__` prints the report.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from verl.data.prompts import Tokenizer, render
from verl.data.rows import BadRow, Row, scan_rows
from verl.errors import DataError

PERCENTILES = (50, 95, 99)


class DecodingTokenizer(Tokenizer, Protocol):
    """A tokenizer that can also turn ids back into text."""

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True)
class FileReport:
    """One file's rows, sound and bad."""

    file: str
    problem: str | None
    """Why nothing of the file can be used; None where it can be read."""
    num_rows: int
    data_sources: Mapping[str, int]
    """Sound rows of each set."""
    bad_rows: tuple[BadRow, ...]


@dataclass(frozen=True)
class Lengths:
    """Prompt lengths over all sound rows."""

    unit: str
    """`tokens`, or `characters` where no tokenizer was given."""
    smallest: int
    mean: float
    percentiles: Mapping[int, int]
    largest: int
    over: Mapping[int, int]
    """How many prompts a budget of that many tokens leaves out; empty without a tokenizer."""


@dataclass(frozen=True)
class Repeated:
    """The rows that hold one and the same prompt."""

    uids: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What `python -m verl.data validate` found."""

    files: tuple[FileReport, ...]
    repeated: tuple[Repeated, ...]
    lengths: Lengths | None
    """None where no row is sound."""
    sample_uid: str = ""
    sample: str = ""
    """The first sound row as the model reads it."""

    @property
    def num_bad(self) -> int:
        """Bad rows of all files."""
        return sum(len(file.bad_rows) for file in self.files)

    @property
    def is_sound(self) -> bool:
        """A run would take every row of every file."""
        return not self.num_bad and all(file.problem is None for file in self.files)


def validate(
    files: Sequence[str],
    tokenizer: DecodingTokenizer | None = None,
    budgets: Sequence[int] = (),
    prompt_key: str = "prompt",
) -> Report:
    """Read every row of every file, also after one that is bad.

    `budgets` are values of `data.max_start_length` (tokens) to count the filtered prompts for.
    """
    found = [_read_file(file, prompt_key) for file in dict.fromkeys(files)]
    reports, rows = tuple(report for report, _ in found), [row for _, own in found for row in own]
    if not rows:
        return Report(reports, (), None)
    texts = [_text(row) for row in rows]
    uids: dict[str, list[str]] = defaultdict(list)
    for row, text in zip(rows, texts, strict=True):
        uids[text].append(row.uid)
    repeated = tuple(Repeated(tuple(same)) for same in uids.values() if len(same) > 1)
    if tokenizer is None:
        lengths, sample = _lengths("characters", [len(text) for text in texts], ()), texts[0]
    else:
        prompts = [render(row, tokenizer).ids for row in rows]
        lengths = _lengths("tokens", [len(ids) for ids in prompts], budgets)
        sample = tokenizer.decode(list(prompts[0]))
    return Report(reports, repeated, lengths, rows[0].uid, sample)


def _read_file(file: str, prompt_key: str) -> tuple[FileReport, list[Row]]:
    """One file's report and its sound rows."""
    problem, found = None, []
    try:
        for row in scan_rows(file, prompt_key):
            found.append(row)
    except DataError as error:
        problem = str(error)
    bad = tuple(row for row in found if isinstance(row, BadRow))
    sound = [replace(row, file=file) for row in found if isinstance(row, Row)]
    sources = dict(sorted(Counter(row.data_source for row in sound).items()))
    return FileReport(file, problem, len(found), sources, bad), sound


def _lengths(unit: str, counts: Sequence[int], budgets: Sequence[int]) -> Lengths:
    values = np.asarray(counts)
    return Lengths(
        unit,
        int(values.min()),
        float(values.mean()),
        {p: int(np.percentile(values, p, method="inverted_cdf")) for p in PERCENTILES},
        int(values.max()),
        {budget: int((values > budget).sum()) for budget in sorted(set(budgets))},
    )


def _text(row: Row) -> str:
    """The prompt without tokens: its own text, or each message after its role."""
    if isinstance(row.prompt, str):
        return row.prompt
    return "\n".join(f"[{message['role']}]\n{message['content']}" for message in row.prompt)
