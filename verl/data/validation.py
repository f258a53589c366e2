"""`python -m verl.data validate FILE...`: check question files before a run.

Reports bad rows, prompt lengths, the number of prompts that each budget leaves out, and one prompt.
All rows of all files are checked, even after an error. Exit status 0: every row can be used; 1:
some file or row cannot; 2: a wrong command line or model.
"""

import argparse
import dataclasses
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl import model_files
from verl.config import DataConfig
from verl.data.prompts import Tokenizer, render
from verl.data.rows import BadRow, Row, scan_rows
from verl.data.values import can_be_given
from verl.errors import DataError, ModelError

PERCENTILES = (50, 95, 99)
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
    prompt_key: str = "prompt",
) -> Report:  # fmt: skip
    """Check every row of every file; counts the prompts over each of `budgets`, in tokens."""
    reports, rows = list[FileReport](), list[Row]()
    prompts: list[tuple[int, ...]] = []
    for file in dict.fromkeys(files):
        report, file_rows, file_prompts = _read_file(file, prompt_key, tokenizer)
        reports.append(report)
        rows += file_rows
        prompts += file_prompts
    if not rows:
        return Report(tuple(reports), (), None)
    texts = [_plain_text(row) for row in rows]
    uids_by_text: dict[str, list[str]] = defaultdict(list)
    for row, text in zip(rows, texts, strict=True):
        uids_by_text[text].append(row.uid)
    repeated = tuple(DuplicatePrompt(tuple(u)) for u in uids_by_text.values() if len(u) > 1)
    if tokenizer is None:
        lengths, sample = _lengths("characters", [len(text) for text in texts], ()), texts[0]
    else:
        lengths = _lengths("tokens", [len(ids) for ids in prompts], budgets)
        sample = tokenizer.decode(list(prompts[0]))
    return Report(tuple(reports), repeated, lengths, rows[0].uid, sample)


def _read_file(
    file: str, prompt_key: str, tokenizer: Tokenizer | None
) -> tuple[FileReport, list[Row], list[tuple[int, ...]]]:
    """Return a file's report, its valid rows and, with a tokenizer, the ids of their prompts."""
    problem, bad_rows = None, list[BadRow]()
    rows, prompts = list[Row](), list[tuple[int, ...]]()
    try:
        for row in scan_rows(file, prompt_key):
            if isinstance(row, BadRow):
                bad_rows.append(row)
                continue
            row = replace(row, file=file)
            try:
                if tokenizer is not None:
                    prompts.append(render(row, tokenizer).ids)
                rows.append(row)
            except DataError as error:  # the chat template rejects the messages
                bad_rows.append(BadRow(file, row.number, str(error)))
    except DataError as error:
        problem = str(error)
    sources = dict(sorted(Counter(row.data_source for row in rows).items()))
    hopeless = sum(not any(map(can_be_given, row.ground_truth)) for row in rows)
    num_rows = len(bad_rows) + len(rows)
    report = FileReport(file, problem, num_rows, sources, tuple(bad_rows), hopeless)
    return report, rows, prompts


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
            tokenizer = model_files.load_tokenizer(options.model, "--model")
            model_files.check_template(tokenizer, options.model, "--model")
    except ModelError as error:
        sys.stderr.write(f"validate: {error}\n")
        return 2
    report = validate(options.files, tokenizer, options.budgets, options.prompt_key)
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
    help = "column of the prompt (%(default)s)"
    add("--prompt_key", "--prompt-key", default=DataConfig.prompt_key, help=help)
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
    sources = ", ".join(f"{name} {count}" for name, count in file.data_sources.items())
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
