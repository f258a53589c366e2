"""Answers of a model or its baselines, scored and compared (docs/evaluation.md)."""

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

ACT = "search_r1.evaluation.running:act"
COMMANDS: dict[str, type] = {"run": EvaluationOptions, "report": ReportOptions,
                             "compare": CompareOptions, "table": TableOptions}  # fmt: skip
ALL: Any = Union[  # noqa: UP007 - of as many as there are
    tuple(Annotated[kind, tyro.conf.subcommand(name)] for name, kind in COMMANDS.items())
]


def main(argv: Sequence[str] | None = None) -> int:
    """Command-line entry; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help"):
        words.insert(0, "run")
    kind, prog = COMMANDS.get(words[0]) if words else None, "search-r1 evaluate"
    if kind is None:
        return run(ACT, ALL, words, prog=prog, description=__doc__)
    # By itself, since tyro would name its help by the first word of `prog` alone.
    return run(ACT, kind, words[1:], prog=f"{prog} {words[0]}", description=kind.__doc__)


if __name__ == "__main__":
    sys.exit(main())
