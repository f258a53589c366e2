"""Runs an evaluation from its options to its report, and the other `search-r1 evaluate` commands.

An evaluation checks its inputs, runs the dialogues that are missing, and writes the report.
"""

import asyncio
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Never

from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from search_r1 import loops
from search_r1.evaluation.grouping import by_labels, read_labels
from search_r1.evaluation.manifest import build_manifest
from search_r1.evaluation.methods import METHODS, method_agent
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
from search_r1.evaluation.runner import Judge, Runner, Task, check_rows
from search_r1.evaluation.samples import FAILED
from search_r1.evaluation.store import REPORT, Store
from search_r1.evaluation.summary import compare
from search_r1.inference.model import (
    at_latest_checkpoint,
    checked_agent,
    compute_dtype,
    open_model_folder,
    running_engine,
)
from search_r1.inference.opening import NO_RETRIEVER, retriever_facts, run_config
from search_r1.plain import configure_logging
from search_r1.rewards import RewardInput
from search_r1.rewards.judge.judge_options import JudgeOptions, read_key
from search_r1.rewards.normalize import RULES
from search_r1.rewards.registry import build_judge
from verl.config import Config
from verl.data.prompts import choose
from verl.data.rows import load_rows
from verl.errors import ConfigError, ToolError, UserError
from verl.files import LOCK_NAME, exclusive_lock
from verl.remote_code import set_trust
from verl.rollout.interface import RolloutEngine
from verl.types import Sampling

logger = logging.getLogger(__name__)

CACHE = "judge.sqlite"
"""File in the evaluation's folder that caches the judge's verdicts for a resumed evaluation."""
MAX_FAILURES_IN_A_ROW = 32
"""Number of consecutive failed dialogues after which the evaluation stops."""


def run_evaluation(options: EvaluationOptions) -> Path:
    """Run all missing dialogues, write the report and return its folder. Raises UserError."""
    set_trust(options.trust_remote_code)
    out = Path(options.out)
    is_new = not out.exists()
    with exclusive_lock(out, "--out"):
        try:
            options = at_latest_checkpoint(options)
            with open_model_folder(options) as folder:
                loops.run(_evaluate(options, run_config(options, str(folder))))
            write_report(out, options.pass_k, options.num_resamples, options.seed)
        finally:
            if is_new and [file.name for file in out.iterdir()] == [LOCK_NAME]:
                shutil.rmtree(out)  # refused before anything was written
    return out


async def _evaluate(options: EvaluationOptions, config: Config) -> None:
    method = METHODS[options.method]
    rows = choose(load_rows(options.data, options.prompt_key), options.num_rows, options.seed)
    facts = await retriever_facts(config.retriever.url) if method.needs_documents else NO_RETRIEVER
    agent = method_agent(checked_agent(config), method)
    tokenizer: Any = agent.tokenizer
    sampling = Sampling(options.max_response_length, options.temperature, options.top_p)
    judge = open_judge(options)
    rule = RULES[options.normalize]
    runner = Runner(agent, method, tokenizer, sampling, options.seed, judge, options.untagged,
                    rule, config.max_turns)  # fmt: skip
    check_rows(rows, runner, min(options.max_start_length, options.max_prompt_length))
    manifest = build_manifest(options, config, facts, len(rows), compute_dtype(options))
    tasks = [Task(row, sample) for row in rows for sample in range(options.n)]
    with Store(Path(options.out), manifest) as store:
        missing = [task for task in tasks if task.key not in store.finished]
        logger.info("%d of %d dialogues are missing", len(missing), len(tasks))
        if not missing:
            return
        try:
            async with running_engine(config) as engine:
                await run_all(missing, runner, engine, store, options.num_at_once)
        finally:
            await agent.environment.aclose()


def open_judge(options: EvaluationOptions) -> Judge | None:
    """Build the judge and check that it answers; None without one. Raises ConfigError."""
    if options.judge_url is None or options.judge_model is None:
        return None
    try:
        key = read_key(options.judge_api_key_env, "--judge-api-key-env")
        judge = build_judge(
            JudgeOptions(options.judge_url, options.judge_model, key, options.judge_verdict,
                         body=json.loads(options.judge_body or "{}"),
                         cache_path=str(Path(options.out) / CACHE))
        )  # fmt: skip
        judge.check()
    except ValueError as error:
        raise ConfigError(f"--judge-url: {error}, or leave out --judge-url") from error

    def score(dialogue: RewardInput) -> float | None:
        (output,) = judge([dialogue])
        return None if output.components["judge_failed"] else output.score

    return score


async def run_all(
    tasks: Sequence[Task], runner: Runner, engine: RolloutEngine, store: Store, concurrency: int
) -> None:
    """Run all tasks and store the samples. Raises ToolError after too many failures in a row."""
    waiting = iter(tasks)
    num_correct, num_failures = 0.0, 0

    async def work(bar: "tqdm[Never]") -> None:
        nonlocal num_correct, num_failures
        for task in waiting:
            sample = await runner.run(task, engine)
            store.append(sample)
            num_correct += sample.em
            num_failures = num_failures + 1 if sample.status == FAILED else 0
            bar.update()
            bar.set_postfix(em=f"{num_correct / bar.n:.3f}", refresh=False)
            if num_failures >= MAX_FAILURES_IN_A_ROW:
                raise ToolError(
                    f"{num_failures} dialogues failed in a row, the last with: {sample.error}; "
                    "check that the retriever answers, then start the same evaluation again: it "
                    "resumes and repeats failed dialogues"
                )

    try:
        with tqdm(total=len(tasks), desc="evaluate", unit="dialogue") as bar:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(tasks))):
                    group.create_task(work(bar))
    except* UserError as errors:
        raise _first_error(errors) from errors


def _first_error(errors: BaseExceptionGroup[UserError]) -> UserError:
    """Return the first of several workers' errors, which usually have the same cause."""
    error = errors.exceptions[0]
    return _first_error(error) if isinstance(error, BaseExceptionGroup) else error


def run_command(options: object) -> int:
    """Run the command for these options and print its report or table."""
    configure_logging(logging.INFO, "%(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "vllm"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    sys.stdout.write(command_output(options))
    return 0


def command_output(options: object) -> str:
    match options:
        case EvaluationOptions():
            return (run_evaluation(options) / REPORT).read_text(encoding="utf-8")
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
