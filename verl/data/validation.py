"""`python -m verl.data validate FILE...`: check question files before a run.

Reports bad rows, prompt lengths, the number of prompts that each budget leaves out, and one prompt.
All rows of all files are checked, even after an error. Exit status 0: every row can be used; 1:
some file or row cannot; 2: a wrong command line or model.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl.config import DataConfig
from verl.data.prompts import Tokenizer, render
from verl.data.records import BadRow
from verl.data.rows import Row, scan_rows
from verl.data.values import can_be_given
from verl.errors import DataError, ModelError, shortened

PERCENTILES = (50, 95, 99)
MAX_SHOWN = 20_000
"""Characters of the prompt that is shown, and its tokens; the rest is cut."""
MAX_COUNTED = 2**17
"""Tokens up to which prompts are counted; those over twice as many count as about that."""
BUDGETS = (256, 512, 1024, DataConfig.max_start_length, 4096)


@dataclass(frozen=True)
class FileReport:
    """Counts and bad rows of one file."""

    file: str
    problem: str | None
    """Why the file cannot be used at all; None if it can be read."""
    num_rows: int
    data_sources: Mapping[str, int]
    """Number of valid rows by `data_source`."""
    bad_rows: tuple[BadRow, ...]
    num_hopeless: int = 0
    """Number of valid rows without an answer that exact match can accept (`can_be_given`)."""


@dataclass(frozen=True)
class Lengths:
    """Statistics of the prompt lengths of all valid rows."""

    unit: str
    """`tokens`, or `characters` without a tokenizer."""
    smallest: int
    mean: float
    percentiles: Mapping[int, int]
    largest: int
    over: Mapping[int, int]
    """Number of prompts over each budget of tokens; empty without a tokenizer."""


@dataclass(frozen=True)
class DuplicatePrompt:
    """Rows with the same prompt."""

    uids: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Result of `python -m verl.data validate`."""

    files: tuple[FileReport, ...]
    repeated: tuple[DuplicatePrompt, ...]
    lengths: Lengths | None
    """None if no row is valid."""
    sample_uid: str = ""
    sample: str = ""
    """The first valid row as the model reads it."""

    @property
    def num_bad(self) -> int:
        """Number of bad rows in all files."""
        return sum(len(file.bad_rows) for file in self.files)

    @property
    def is_sound(self) -> bool:
        """Whether a run would accept every row of every file."""
        return not self.num_bad and all(file.problem is None for file in self.files)


def validate(
    files: Sequence[str], tokenizer: Tokenizer | None = None, budgets: Sequence[int] = (),
) -> Report:  # fmt: skip
    """Check every row of every file; counts the prompts over each of `budgets`, in tokens."""
    prompts = _Prompts(tokenizer, max((*budgets, MAX_COUNTED)))
    reports = tuple(_read_file(file, prompts) for file in dict.fromkeys(files))
    if not prompts.lengths:
        return Report(reports, (), None)
    repeated = tuple(DuplicatePrompt(tuple(u)) for u in prompts.uids.values() if len(u) > 1)
    unit = "characters" if tokenizer is None else "tokens"
    lengths = _lengths(unit, prompts.lengths, () if tokenizer is None else budgets)
    return Report(reports, repeated, lengths, *prompts.first)


class _Prompts:
    """What the report says of the prompts of valid rows; the rows themselves are not kept."""

    def __init__(self, tokenizer: Tokenizer | None, max_counted: int) -> None:
        self._tokenizer, self._max_counted = tokenizer, max_counted
        self.lengths: list[int] = []
        self.uids: dict[bytes, list[str]] = defaultdict(list)
        """The rows of each prompt, by a hash of its text."""
        self.first = ("", "")
        """The uid of the first row, and its prompt as the model reads it."""

    def add(self, row: Row) -> None:
        """Note a row. Raises DataError if the chat template rejects its messages."""
        text = _plain_text(row)
        ids: Sequence[int] = ()
        if self._tokenizer is not None:
            ids = render(row, self._tokenizer, limit=self._max_counted).ids
        if not self.lengths:
            beginning = ids[:MAX_SHOWN]
            shown = self._tokenizer.decode(list(beginning)) if self._tokenizer else text
            rest = "…" if len(shown) > MAX_SHOWN or len(ids) > MAX_SHOWN else ""
            self.first = (row.uid, shown[:MAX_SHOWN] + rest)
        self.lengths.append(len(text if self._tokenizer is None else ids))
        self.uids[hashlib.blake2b(text.encode(), digest_size=16).digest()].append(row.uid)


def _read_file(file: str, prompts: _Prompts) -> FileReport:
    """Return a file's report, and note the prompts of its valid rows."""
    problem, bad_rows = None, list[BadRow]()
    sources, num_hopeless = Counter[str](), 0
    try:
        for row in scan_rows(file):
            if isinstance(row, BadRow):
                bad_rows.append(row)
                continue
            try:
                prompts.add(replace(row, file=file))
            except DataError as error:  # the chat template rejects the messages
                bad_rows.append(BadRow(file, row.number, str(error)))
                continue
            sources[row.data_source] += 1
            num_hopeless += not any(map(can_be_given, row.ground_truth))
    except DataError as error:
        problem = str(error)
    num_rows = len(bad_rows) + sources.total()
    by_name = dict(sorted(sources.items()))
    return FileReport(file, problem, num_rows, by_name, tuple(bad_rows), num_hopeless)


def _lengths(unit: str, counts: Sequence[int], budgets: Sequence[int]) -> Lengths:
    values = np.asarray(counts)
    percentiles = {p: int(np.percentile(values, p, method="inverted_cdf")) for p in PERCENTILES}
    smallest, mean, largest = int(values.min()), float(values.mean()), int(values.max())
    over = {budget: int((values > budget).sum()) for budget in sorted(set(budgets))}
    return Lengths(unit, smallest, mean, percentiles, largest, over)


def _plain_text(row: Row) -> str:
    """Return a prompt as text: the plain string, or each message after its role."""
    if isinstance(row.prompt, str):
        return row.prompt
    return "\n".join(f"[{message['role']}]\n{message['content']}" for message in row.prompt)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _parser().parse_args(argv)
    tokenizer = None
    try:
        if options.model:
            from verl import model_files  # noqa: PLC0415 (torch takes seconds to import)

            tokenizer = model_files.load_tokenizer(options.model, "--model")
            model_files.check_template(tokenizer, options.model, "--model")
    except ModelError as error:
        sys.stderr.write(f"validate: {error}\n")
        return 2
    report = validate(options.files, tokenizer, options.budgets)
    text = "\n".join(lines(report))
    if options.json:
        text = json.dumps(to_json(report), ensure_ascii=False, indent=2)
    sys.stdout.write(f"{text}\n")
    return 0 if report.is_sound else 1


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m verl.data", description=__doc__)
    commands = result.add_subparsers(required=True, metavar="validate")
    add = commands.add_parser("validate", help="check files, show what a run reads").add_argument
    add("files", nargs="+", metavar="FILE", help="parquet or jsonl file")
    add("--model", help="model folder or hub name, whose tokenizer gives lengths in tokens")
    help = f"values of data.max_start_length to try (default {BUDGETS})"
    add("--budgets", type=_budgets, default=BUDGETS, metavar="N,N", help=help)
    add("--json", action="store_true", help="print one JSON object instead of text")
    return result


def to_json(report: Report) -> dict[str, object]:
    """Return the report as JSON values, with `is_sound` and `num_bad`."""
    verdict = {"is_sound": report.is_sound, "num_bad": report.num_bad}
    return {**verdict, **dataclasses.asdict(report)}


def lines(report: Report) -> Iterator[str]:
    """Yield the lines of the report as text, one for each bad row."""
    for file in report.files:
        yield from _file_lines(file)
    if report.repeated:
        examples = "; ".join(" = ".join(prompt.uids[:3]) for prompt in report.repeated[:5])
        yield f"note: {len(report.repeated)} prompts occur in several rows, such as {examples}"
    if report.lengths:
        yield from _length_lines(report.lengths)
        yield f"\n{report.sample_uid} as the model reads it:\n{report.sample}\n"
    num_unusable = sum(file.problem is not None for file in report.files)
    unusable = f" and {num_unusable} unusable files" if num_unusable else ""
    yield "sound" if report.is_sound else f"not sound: {report.num_bad} bad rows{unusable}"


def _file_lines(file: FileReport) -> Iterator[str]:
    sources = shortened(", ".join(f"{n} {count}" for n, count in file.data_sources.items()), 1000)
    yield f"{file.file}: {file.num_rows} rows, {len(file.bad_rows)} bad; {sources or 'none sound'}"
    yield from (f"  bad: {row.problem}" for row in file.bad_rows)
    if file.num_hopeless:
        yield f"  note: {file.num_hopeless} rows have no answer that exact match can accept"
    if file.problem:
        yield f"  unusable: {file.problem}"


def _length_lines(lengths: Lengths) -> Iterator[str]:
    percentiles = ", ".join(f"{p} % at most {n}" for p, n in lengths.percentiles.items())
    extremes = f"{lengths.smallest} to {lengths.largest}"
    yield f"length in {lengths.unit}: {extremes}, mean {lengths.mean:.1f}, {percentiles}"
    for budget, count in lengths.over.items():
        yield f"  data.max_start_length={budget} leaves out {count}"
    if not lengths.over:
        yield "  give --model for lengths in tokens, and for the prompts over each limit"


def _budgets(text: str) -> tuple[int, ...]:
    budgets = tuple(int(part) for part in text.split(","))
    if min(budgets) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected counts of 1 or more")
    return budgets
