"""Rules between the options of rewards: stages, the judge, and where trajectories are kept.

Names of rewards are known to `search_r1.rewards` alone, which refuses unknown ones when it builds
the reward, before the run starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from verl.config import Config
from verl.config.reward import JudgeConfig, PlateauConfig, RewardConfig, StageConfig

Problem = tuple[str, object, str, str]
"""Subject, got, expected, fix."""
LLM_JUDGE = "llm_judge"
VERDICTS = ("yes_no", "score")
READERS = {
    "format_score": "em",
    "structure_format_score": "em_format",
    "final_format_score": "em_format",
    "retrieval_score": "em_format",
    "correct_answer": "em_cost",
    "search_penalty": "em_cost",
    "invalid_format": "em_cost",
    "penalise_correct_only": "em_cost",
}
"""The reward that reads each partial score."""
PLACEHOLDERS = ("{question}", "{accepted}", "{answer}")


def reward_problems(config: Config) -> Iterator[Problem]:
    """All that is wrong with `reward_model`."""
    rewards = config.reward_model
    yield from _stage_problems(rewards, config.trainer.test_freq)
    yield from _unread_scores(rewards)
    if LLM_JUDGE in names_in_use(rewards):
        yield from _judge_problems(rewards.judge)


def names_in_use(rewards: RewardConfig) -> set[str]:
    """Every reward that a run may score with."""
    sections: Sequence[RewardConfig | StageConfig] = rewards.stages or [rewards]
    return {name for section in sections for name in (section.weights or [section.name])}


def _unread_scores(rewards: RewardConfig) -> Iterator[Problem]:
    """Partial scores that no reward of the run pays."""
    usual, used = RewardConfig(), names_in_use(rewards)
    for name, reader in READERS.items():
        got = getattr(rewards, name)
        if got != getattr(usual, name) and reader not in used:
            key = f"reward_model.{name}"
            expected = f"{getattr(usual, name)}: it is a score of {reader}, which is not used here"
            yield key, got, expected, f"reward_model.name={reader}, or leave {key} out"


def _stage_problems(rewards: RewardConfig, test_freq: int) -> Iterator[Problem]:
    key, stages = "reward_model.stages", rewards.stages
    if stages and rewards.weights:
        expected = "stages or weights; a stage may have weights of its own"
        yield key, "stages beside reward_model.weights", expected, "leave one of them out"
    for number, stage in enumerate(stages, 1):
        where, has_end = f"stage {number} of {key}", stage.until_step or stage.plateau
        if number < len(stages) and not has_end:
            yield where, "no end", "until_step or plateau: another stage follows", "until_step: 100"
        if number == len(stages) and has_end:
            yield where, "an end", "none: no stage follows", "leave until_step and plateau out"
        if stage.plateau is not None:
            yield from _plateau_problems(where, stage.plateau, test_freq)
    ends = [0, *(stage.until_step for stage in stages if stage.until_step is not None)]
    if any(later <= earlier for earlier, later in itertools.pairwise(ends)):
        yield key, f"until_step {ends[1:]}", "numbers above 0 that rise", "put them in order"


def _plateau_problems(where: str, plateau: PlateauConfig, test_freq: int) -> Iterator[Problem]:
    if plateau.patience < 1:
        yield f"{where}, plateau.patience", plateau.patience, "1 or more values", "patience: 10"
    if plateau.min_delta < 0:
        yield f"{where}, plateau.min_delta", plateau.min_delta, "0 or more", "min_delta: 0.0"
    if plateau.metric.startswith("val/") and test_freq < 1:
        got = f"{plateau.metric} with trainer.test_freq={test_freq}"
        yield f"{where}, plateau.metric", got, "a metric that is taken", "trainer.test_freq=10"


def _judge_problems(judge: JudgeConfig) -> Iterator[Problem]:
    key = "reward_model.judge"
    if judge.url is None or not judge.url.startswith(("http://", "https://")):
        expected = "the http address of an OpenAI-compatible endpoint, for llm_judge"
        yield f"{key}.url", judge.url, expected, f"{key}.url=http://127.0.0.1:8001/v1"
    if not judge.model:
        yield f"{key}.model", judge.model, "the name of a model there", f"{key}.model=NAME"
    if judge.verdict not in VERDICTS:
        expected = f"one of {', '.join(VERDICTS)}"
        yield f"{key}.verdict", judge.verdict, expected, f"{key}.verdict=yes_no"
    lacking = [p for p in PLACEHOLDERS if judge.prompt is not None and p not in judge.prompt]
    if lacking:
        expected = f"a text with {', '.join(PLACEHOLDERS)}"
        yield f"{key}.prompt", f"no {', '.join(lacking)}", expected, "add them, or leave it null"
    if judge.timeout <= 0:
        yield f"{key}.timeout", judge.timeout, "more than 0 seconds", f"{key}.timeout=60"
    if judge.max_retries < 0:
        yield f"{key}.max_retries", judge.max_retries, "0 or more", f"{key}.max_retries=3"
    for name in ("max_concurrency", "max_tokens", "max_answer_chars"):
        if getattr(judge, name) < 1:
            yield f"{key}.{name}", getattr(judge, name), "1 or more", f"{key}.{name}=32"
