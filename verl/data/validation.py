"""What a run would say of question files, told all at once: bad rows, lengths, filtering, a prompt.

Nothing here stops at the first fault; `verl.data.__main__` prints the report.
"""

from __future__ import annotations

import itertools
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
    """A tokenizer that can also show what it made."""

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
    """One prompt that stands in several rows."""

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
    """Read every row of every file; a file or row at fault hides no other.

    `budgets` are values of `data.max_start_length` (tokens) to count the filtered prompts for.
    """
    reports, rows = [], []
    for file in dict.fromkeys(files):
        report, sound = _read_file(file, prompt_key)
        reports.append(report)
        rows += sound
    if not rows:
        return Report(tuple(reports), (), None)
    lengths, sample = _measure(rows, tokenizer, budgets)
    return Report(tuple(reports), _repeated(rows), lengths, rows[0].uid, sample)


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


def _measure(
    rows: Sequence[Row], tokenizer: DecodingTokenizer | None, budgets: Sequence[int]
) -> tuple[Lengths, str]:
    """Lengths of all prompts, and the first one as text."""
    if tokenizer is None:
        texts = [_text(row) for row in rows]
        return _lengths("characters", [len(text) for text in texts], ()), texts[0]
    counts = [len(render(row, tokenizer).ids) for row in rows]
    first = list(render(rows[0], tokenizer).ids)
    return _lengths("tokens", counts, budgets), tokenizer.decode(first)


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


def _repeated(rows: Sequence[Row]) -> tuple[Repeated, ...]:
    """Prompts that stand in several rows, in one file or across files."""
    places: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        places[_text(row)].append(row.uid)
    return tuple(Repeated(tuple(uids)) for uids in places.values() if len(uids) > 1)


def _text(row: Row) -> str:
    """The prompt without tokens: its own text, or each message after its role."""
    if isinstance(row.prompt, str):
        return row.prompt
    parts = ((f"[{message['role']}]", message["content"]) for message in row.prompt)
    return "\n".join(itertools.chain.from_iterable(parts))
