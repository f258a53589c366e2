"""Runs the dialogues of an evaluation that are missing, with the model and the judge."""

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Never

from tqdm import tqdm

from search_r1.evaluation.manifest import build_manifest
from search_r1.evaluation.methods import METHODS, method_agent
from search_r1.evaluation.options import EvaluationOptions
from search_r1.evaluation.runner import Judge, Runner, Task, check_rows
from search_r1.evaluation.samples import FAILED
from search_r1.evaluation.store import Store
from search_r1.inference.building import checked_agent, run_config
from search_r1.inference.model import compute_dtype, running_engine
from search_r1.inference.retriever_facts import Facts
from search_r1.rewards import RewardInput
from search_r1.rewards.judge.judge_options import JudgeOptions, read_key
from search_r1.rewards.normalize import RULES
from search_r1.rewards.registry import build_judge
from verl.data.rows import Row
from verl.engine import RolloutEngine
from verl.errors import ConfigError, ToolError, UserError
from verl.types import Sampling

logger = logging.getLogger(__name__)

CACHE = "judge.sqlite"
"""File in the evaluation's folder that caches the judge's verdicts for a resumed evaluation."""
MAX_FAILURES_IN_A_ROW = 32
"""Number of consecutive failed dialogues after which the evaluation stops."""


async def run_missing(
    options: EvaluationOptions, folder: Path, rows: Sequence[Row], facts: Facts
) -> None:
    """Run the model of `folder` on the rows that the evaluation lacks. Raises UserError.

    `facts` describe the retriever.
    """
    config, method = run_config(options, str(folder)), METHODS[options.method]
    if method.template is not None:
        config.agent.name = "dialogue"  # a baseline has its own documents, or none
    agent = method_agent(checked_agent(config), method)
    tokenizer: Any = agent.tokenizer
    data = config.data
    sampling = Sampling(data.max_response_length, options.temperature, options.top_p)
    judge = open_judge(options)
    rule = RULES[config.reward_model.normalize]
    runner = Runner(agent, method, tokenizer, sampling, options.seed, judge, options.untagged,
                    rule, config.max_turns)  # fmt: skip
    check_rows(rows, runner, min(data.max_start_length, data.max_prompt_length))
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
