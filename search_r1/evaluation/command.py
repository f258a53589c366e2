"""What the commands of `search-r1 evaluate` do."""

from __future__ import annotations

import logging
import sys
from functools import singledispatch
from pathlib import Path

from transformers.utils import logging as transformers_logging

from search_r1.evaluation.comparison import compare
from search_r1.evaluation.options import (
    CompareOptions,
    EvaluationOptions,
    ReportOptions,
    TableOptions,
)
from search_r1.evaluation.report import write_report
from search_r1.evaluation.running import evaluate
from search_r1.evaluation.store import REPORT
from search_r1.evaluation.tables import (
    check_corpora,
    check_data,
    comparison_table,
    read_all,
    table,
)


def act(options: object) -> int:
    """Do what the command line asks for, and print its report or table."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "vllm"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    sys.stdout.write(text_of(options))
    return 0


@singledispatch
def text_of(options: object) -> str:
    """The report or table of a command."""
    raise AssertionError(f"got {options!r}, expected the options of a command")


@text_of.register
def _run(options: EvaluationOptions) -> str:
    return _report_in(evaluate(options))


@text_of.register
def _report(options: ReportOptions) -> str:
    write_report(options.folder, options.pass_k, options.num_resamples, options.seed)
    return _report_in(options.folder)


@text_of.register
def _compare(options: CompareOptions) -> str:
    first, second = read_all([options.first, options.second])
    check_data([first, second], is_mixed=options.mixed)
    check_corpora([first, second], is_mixed=options.mixed)
    found = compare(first.samples, second.samples, options.measure,
                    num_resamples=options.num_resamples, seed=options.seed)  # fmt: skip
    return comparison_table(first, second, found, options.measure)


@text_of.register
def _table(options: TableOptions) -> str:
    return table(options.folders, options.measure, is_mixed=options.mixed,
                 num_resamples=options.num_resamples, seed=options.seed)  # fmt: skip


def _report_in(folder: Path) -> str:
    return (folder / REPORT).read_text(encoding="utf-8")
