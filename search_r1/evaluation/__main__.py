"""Answers of a model or its baselines, scored and compared (docs/evaluation.md)."""

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from search_r1.evaluation.options import (
    CompareOptions,
    EvaluationOptions,
    ReportOptions,
    TableOptions,
)
from search_r1.options import run

Options = (
    Annotated[EvaluationOptions, tyro.conf.subcommand("run")]
    | Annotated[ReportOptions, tyro.conf.subcommand("report")]
    | Annotated[CompareOptions, tyro.conf.subcommand("compare")]
    | Annotated[TableOptions, tyro.conf.subcommand("table")]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words.insert(0, "run")
    return run("search_r1.evaluation.running:act", Options, words, prog="search-r1 evaluate",
               description=__doc__)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
