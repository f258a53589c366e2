"""`python -m verl.data validate FILE...`: what a run would say of question files, before a run.

Exit status 0: every row can be used; 1: some file or row cannot; 2: a wrong command line or model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import cast

from verl import tokenizer_files
from verl.config.data import DataConfig
from verl.data.validation import DecodingTokenizer, FileReport, Lengths, Report, validate
from verl.errors import ModelError

BUDGETS = (256, 512, 1024, DataConfig.max_start_length, 4096)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        tokenizer = load_tokenizer(options.model) if options.model else None
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


def load_tokenizer(model: str) -> DecodingTokenizer:
    """The model's tokenizer, with a chat template that works. Raises ModelError."""
    tokenizer = tokenizer_files.load_tokenizer(model, "--model")
    tokenizer_files.check_template(tokenizer, model, "--model")
    return cast(DecodingTokenizer, tokenizer)


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


if __name__ == "__main__":
    sys.exit(main())
