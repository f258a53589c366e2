"""Own questions as rows: `python scripts/data_process/own_questions.py questions.csv`.

Files are csv (`question,answer`), jsonl or parquet (`question` and `golden_answers`, `answers` or
`answer`). Rows that name a `split` go to `<split>.parquet`; the others are divided into
`train.parquet` and `test.parquet`.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # started as a file: the checkout may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.datasets.building import make_rows, take_sound, write_rows
from search_r1.datasets.own import OwnFiles, divide, select
from search_r1.datasets.wording import BASE, Style, template_types, writer
from verl.errors import SearchR1Error


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; a user's mistake ends in one message and status 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = parser().parse_args(argv)
    try:
        build(options)
    except SearchR1Error as error:
        sys.stderr.write(f"own_questions: {error}\n")
        return 2
    return 0


def build(options: argparse.Namespace) -> None:
    """Read all files, then write a parquet file for each split."""
    words = writer(Style.SEARCH, options.template_type)
    files = OwnFiles(options.files, options.data_source, options.split, options.answer_separator)
    found = select(take_sound(files.read(), drop_bad=options.drop_bad_rows), options.data_sources)
    questions = divide(found, options.test_share, options.seed)
    for split in sorted({question.split for question in questions}):
        some = [question for question in questions if question.split == split]
        rows = make_rows(some, words, split, keep_extra=True)
        write_rows(rows, options.local_dir / f"{split}.parquet")


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(prog="own_questions", description=__doc__)
    add = result.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="csv, jsonl or parquet")
    add("--local_dir", type=Path, default=Path("data/own"), help="folder for the files")
    add("--data_source", help="name of the set where rows have none; default: the file's name")
    add("--data_sources", type=_names, default=(), help="take only these sets, with commas")
    add("--split", default="", help="split of rows that name none, instead of dividing them")
    add("--test_share", type=float, default=0.1, help="of the divided questions (%(default)s)")
    add("--seed", type=int, default=0, help="of the division")
    names = ", ".join(template_types(Style.SEARCH))
    add("--template_type", default=BASE, help=f"wording of the prompt: {names}")
    add("--answer_separator", default="|", help="between answers in a csv field (%(default)s)")
    add("--drop_bad_rows", action="store_true", help="leave bad rows out instead of refusing")
    return result


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
