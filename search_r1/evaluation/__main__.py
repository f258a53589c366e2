"""Evaluate a model or a baseline, and compare evaluations (docs/guides/evaluation.md)."""

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Union

import tyro

from search_r1.evaluation.options import (
    CompareOptions,
    EvaluationOptions,
    ReportOptions,
    TableOptions,
)
from search_r1.options import run

RUN_COMMAND = "search_r1.evaluation.command:run_command"
COMMANDS: dict[str, type] = {"run": EvaluationOptions, "report": ReportOptions,
                             "compare": CompareOptions, "table": TableOptions}  # fmt: skip
ALL: Any = Union[  # noqa: UP007 - built from a dictionary
    tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items())
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words.insert(0, "run")
    kind, prog = COMMANDS.get(words[0]) if words else None, "search-r1 evaluate"
    if kind is None:
        return run(RUN_COMMAND, ALL, words, prog=prog, description=__doc__)
    # Parsed as a separate command, since tyro's help shows only the first word of `prog`.
    return run(RUN_COMMAND, kind, words[1:], prog=f"{prog} {words[0]}", description=kind.__doc__)


if __name__ == "__main__":
    sys.exit(main())
