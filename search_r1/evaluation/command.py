"""The commands `search-r1 evaluate run`, `report`, `compare` and `table`."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub.utils.tqdm import disable_progress_bars

from search_r1.evaluation.evaluating import run_evaluation
from search_r1.evaluation.grouping import by_labels, read_labels
from search_r1.evaluation.options import (
    CompareOptions,
    ComparisonOptions,
    EvaluationOptions,
    ReportOptions,
    TableOptions,
)
from search_r1.evaluation.report import (
    FinishedEvaluation,
    comparison_table,
    read_all,
    table,
    write_report,
)
from search_r1.evaluation.store import REPORT
from search_r1.evaluation.summary import compare
from search_r1.inference.ending import exits_at_signals
from search_r1.plain import configure_logging


@exits_at_signals()
def run_command(options: object) -> int:
    """Run the command for these options and print its report or table."""
    configure_logging(logging.INFO, "%(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "vllm"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    disable_progress_bars()
    sys.stdout.write(command_output(options))
    return 0


def command_output(options: object) -> str:
    match options:
        case EvaluationOptions():
            run_evaluation(options)
            return (Path(options.out) / REPORT).read_text(encoding="utf-8")
        case ReportOptions():
            write_report(options.folder, options.pass_k, options.num_resamples, options.seed)
            return (options.folder / REPORT).read_text(encoding="utf-8")
        case CompareOptions():
            first, second = _finished([options.first, options.second], options)
            differences = compare(first.samples, second.samples, options.measure,
                                  num_resamples=options.num_resamples,
                                  seed=options.seed)  # fmt: skip
            return comparison_table(first, second, differences, options.measure)
        case TableOptions():
            return table(_finished(options.folders, options), options.measure,
                         num_resamples=options.num_resamples, seed=options.seed,
                         paper=options.paper)  # fmt: skip
    raise AssertionError(f"got {options!r}, expected the options of a command")


def _finished(folders: Sequence[Path], options: ComparisonOptions) -> list[FinishedEvaluation]:
    """Read evaluations, with their questions by set or by a column. Raises UserError."""
    evaluations = read_all(folders, is_mixed=options.mixed)
    if options.by is None:
        return evaluations
    labels = read_labels(options.by_data, options.by)
    return [by_labels(evaluation, labels) for evaluation in evaluations]
