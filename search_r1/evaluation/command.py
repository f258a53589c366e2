"""What the commands of `search-r1 evaluate` do."""

from __future__ import annotations

import logging
import sys

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
from search_r1.evaluation.tables import comparison_table, read_all, table
from search_r1.plain import log


def act(options: object) -> int:
    """Do what the command line asks for, and print its report or table."""
    log(logging.INFO, "%(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "vllm"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    sys.stdout.write(text_of(options))
    return 0


def text_of(options: object) -> str:
    """The report or table of a command."""
    match options:
        case EvaluationOptions():
            return (evaluate(options) / REPORT).read_text(encoding="utf-8")
        case ReportOptions():
            write_report(options.folder, options.pass_k, options.num_resamples, options.seed)
            return (options.folder / REPORT).read_text(encoding="utf-8")
        case CompareOptions():
            first, second = read_all([options.first, options.second], is_mixed=options.mixed)
            found = compare(first.samples, second.samples, options.measure,
                            num_resamples=options.num_resamples, seed=options.seed)  # fmt: skip
            return comparison_table(first, second, found, options.measure)
        case TableOptions():
            return table(options.folders, options.measure, is_mixed=options.mixed,
                         num_resamples=options.num_resamples, seed=options.seed)  # fmt: skip
    raise AssertionError(f"got {options!r}, expected the options of a command")
