"""`python -m verl.data validate FILE...`: what a run would say of question files, before a run.

Bad rows, prompt lengths, what a budget leaves out, one prompt; an error in one row or file hides no
other. Exit status 0: every row can be used; 1: some file or row cannot; 2: a wrong command line or
model.
"""

from __future__ import annotations

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
from verl.errors import DataError, ModelError

PERCENTILES = (50, 95, 99)
BUDGETS = (256, 512, 1024, DataConfig.max_start_length, 4096)


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
class DuplicatePrompt:
    """The rows that hold one and the same prompt."""

    uids: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """What `python -m verl.data validate` found."""

    files: tuple[FileReport, ...]
    repeated: tuple[DuplicatePrompt, ...]
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
    tokenizer: Tokenizer | None = None,
    budgets: Sequence[int] = (),
    prompt_key: str = "prompt",
) -> Report:
    """Read every row of every file, also after one that is bad.

    `budgets` are values of `data.max_start_length` (tokens) to count the filtered prompts for.
    """
    found = [_read_file(file, prompt_key, tokenizer) for file in dict.fromkeys(files)]
    reports = tuple(report for report, _, _ in found)
    rows = [row for _, own, _ in found for row in own]
    prompts = [ids for _, _, own in found for ids in own]
    if not rows:
        return Report(reports, (), None)
    texts = [_plain_text(row) for row in rows]
    uids: dict[str, list[str]] = defaultdict(list)
    for row, text in zip(rows, texts, strict=True):
        uids[text].append(row.uid)
    repeated = tuple(DuplicatePrompt(tuple(same)) for same in uids.values() if len(same) > 1)
    if tokenizer is None:
        lengths, sample = _lengths("characters", [len(text) for text in texts], ()), texts[0]
    else:
        lengths = _lengths("tokens", [len(ids) for ids in prompts], budgets)
        sample = tokenizer.decode(list(prompts[0]))
    return Report(reports, repeated, lengths, rows[0].uid, sample)


def _read_file(
    file: str, prompt_key: str, tokenizer: Tokenizer | None
) -> tuple[FileReport, list[Row], list[tuple[int, ...]]]:
    """One file's report, its sound rows and, with a tokenizer, the ids of their prompts."""
    problem, bad, sound, prompts = None, list[BadRow](), list[Row](), list[tuple[int, ...]]()
    try:
        for row in scan_rows(file, prompt_key):
            if isinstance(row, BadRow):
                bad.append(row)
                continue
            row = replace(row, file=file)
            try:
                prompts += [] if tokenizer is None else [render(row, tokenizer).ids]
                sound.append(row)
            except DataError as error:  # the chat template takes no such messages
                bad.append(BadRow(file, row.number, str(error)))
    except DataError as error:
        problem = str(error)
    sources = dict(sorted(Counter(row.data_source for row in sound).items()))
    return FileReport(file, problem, len(bad) + len(sound), sources, tuple(bad)), sound, prompts


def _lengths(unit: str, counts: Sequence[int], budgets: Sequence[int]) -> Lengths:
    values = np.asarray(counts)
    middle = {p: int(np.percentile(values, p, method="inverted_cdf")) for p in PERCENTILES}
    over = {budget: int((values > budget).sum()) for budget in sorted(set(budgets))}
    return Lengths(unit, int(values.min()), float(values.mean()), middle, int(values.max()), over)


def _plain_text(row: Row) -> str:
    """The prompt without tokens: its own text, or each message after its role."""
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
    shown = json.dumps(to_json(report), ensure_ascii=False, indent=2) if options.json else None
    sys.stdout.write((shown or "\n".join(lines(report))) + "\n")
    return 0 if report.is_sound else 1


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m verl.data", description=__doc__)
    commands = result.add_subparsers(required=True, metavar="validate")
    add = commands.add_parser("validate", help="check files, show what a run reads").add_argument
    add("files", nargs="+", metavar="FILE", help="parquet or jsonl")
    add("--model", help="folder or hub name of the tokenizer: lengths in tokens")
    help = f"values of data.max_start_length to try (default {BUDGETS})"
    add("--budgets", type=_budgets, default=BUDGETS, metavar="N,N", help=help)
    help = "column of the prompt (%(default)s)"
    add("--prompt_key", "--prompt-key", default=DataConfig.prompt_key, help=help)
    add("--json", action="store_true", help="one JSON object instead of text")
    return result


def to_json(report: Report) -> dict[str, object]:
    """The report as plain values, with its verdict."""
    verdict = {"is_sound": report.is_sound, "num_bad": report.num_bad}
    return {**verdict, **dataclasses.asdict(report)}


def lines(report: Report) -> Iterator[str]:
    """The report as text: every bad row has a line."""
    for file in report.files:
        yield from _file_lines(file)
    if report.repeated:
        shown = "; ".join(" = ".join(one.uids[:3]) for one in report.repeated[:5])
        yield f"note: {len(report.repeated)} prompts stand in several rows, such as {shown}"
    if report.lengths:
        yield from _length_lines(report.lengths)
        yield f"\n{report.sample_uid} as the model reads it:\n{report.sample}\n"
    files = sum(file.problem is not None for file in report.files)
    broken = f" and {files} unusable files" if files else ""
    yield "sound" if report.is_sound else f"not sound: {report.num_bad} bad rows{broken}"


def _file_lines(file: FileReport) -> Iterator[str]:
    sources = ", ".join(f"{name} {count}" for name, count in file.data_sources.items())
    yield f"{file.file}: {file.num_rows} rows, {len(file.bad_rows)} bad; {sources or 'none sound'}"
    yield from (f"  bad: {row.problem}" for row in file.bad_rows)
    if file.problem:
        yield f"  unusable: {file.problem}"


def _length_lines(lengths: Lengths) -> Iterator[str]:
    middle = ", ".join(f"{p} % at most {n}" for p, n in lengths.percentiles.items())
    spread = f"{lengths.smallest} to {lengths.largest}, mean {lengths.mean:.1f}, {middle}"
    yield f"length in {lengths.unit}: {spread}"
    for budget, count in lengths.over.items():
        yield f"  data.max_start_length={budget} leaves out {count}"
    if not lengths.over:
        yield "  give --model for tokens, and for what each data.max_start_length leaves out"


def _budgets(text: str) -> tuple[int, ...]:
    """Token counts from `512,1024`."""
    budgets = tuple(int(part) for part in text.split(","))
    if min(budgets) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected counts of 1 or more")
    return budgets
