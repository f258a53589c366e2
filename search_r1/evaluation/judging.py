"""The optional judge: the reward `llm_judge`, asked about each dialogue besides the rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from search_r1.evaluation.options import EvaluationOptions
from search_r1.rewards import RewardInput
from search_r1.rewards.judge.options import JudgeOptions, key_in
from search_r1.rewards.registry import build_judge
from verl.errors import ConfigError

CACHE = "judge.sqlite"
"""Beside the samples: what was judged before an interruption is not asked again."""

Judge = Callable[[RewardInput], float | None]
"""The score of a dialogue; None where no verdict is to be had."""


def open_judge(options: EvaluationOptions) -> Judge | None:
    """The judge of the options, known to answer; None where none is named. Raises ConfigError."""
    if options.judge_url is None or options.judge_model is None:
        return None
    cache = str(Path(options.out) / CACHE)
    try:
        key = key_in(options.judge_api_key_env, "--judge-api-key-env")
        judge = build_judge(
            JudgeOptions(options.judge_url, options.judge_model, key, options.judge_verdict,
                         cache_path=cache)
        )  # fmt: skip
        judge.check()
    except ValueError as error:
        raise ConfigError(f"--judge-url: {error}, or leave --judge-url out") from error

    def score(dialogue: RewardInput) -> float | None:
        (output,) = judge([dialogue])
        return None if output.components["judge_failed"] else output.score

    return score
