"""The partial scores and the judge of a run, given as mappings."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from search_r1.rewards import JudgeOptions, RewardScores
from search_r1.scoring_options import SCORES, read_judge, read_scores
from verl.config import cli

URL, CACHE = "http://127.0.0.1:1/v1", Path("run/judge.sqlite")


def test_scores_are_read_by_name() -> None:
    """Under the original's name, too; the default is allowed without the reward."""
    words = [
        "data.train_files=t",
        "data.val_files=v",
        "actor_rollout_ref.model.path=m",
        "reward_model.structure_format_score=0.2",
        "reward_model.scores.format_score=0",
    ]
    given = cli.compose(words).reward_model.scores
    assert read_scores(given, {"em_format"}) == RewardScores(structure_format_score=0.2)
    assert {field.name for field in dataclasses.fields(RewardScores)} == set(SCORES)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"search_penalty": 0.1}, "scores.search_penalty: got 0.1, .* reward em_cost"),
        ({"no_answer": 0.1}, "scores.no_answer: got 0.1, .* reward f1"),
        ({"format": 0.1}, "scores.format: .*did you mean format_score"),
        ({"format_score": "x"}, "scores.format_score: got 'x'"),
        ({"format_score": True}, "scores.format_score: got True"),
        ({"format_score": 1.5}, "scores.format_score: got 1.5, expected at most 1; fix: "),
        ({"correct_answer": 1001}, "scores.correct_answer: got 1001, expected at most 1000"),
        ({"search_penalty": 1e4}, "scores.search_penalty: got 10000.0, expected at most 1000"),
        ({"invalid_format": math.inf}, "scores.invalid_format: got inf, expected at most 1000"),
        ({"retrieval_score": math.nan}, "scores.retrieval_score: got nan, expected at most 1"),
    ],
)
def test_other_scores_are_refused(given: dict[str, Any], words: str) -> None:
    """A misspelt name, a value of another type, and a score that no reward of the run uses."""
    with pytest.raises(ValueError, match=words):
        read_scores(given, {"em"})


def test_a_judge_has_a_cache_in_the_folder_of_the_run() -> None:
    """Null disables it."""
    judge = {"url": URL, "model": "m", "timeout": 5, "body": {"seed": 3}}
    assert read_judge(judge, CACHE) == JudgeOptions(
        URL, "m", timeout=5, body={"seed": 3}, cache_path=str(CACHE)
    )
    assert read_judge({**judge, "cache_path": None}, CACHE).cache_path is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("url", "localhost"), ("url", None), ("model", ""), ("verdict", "maybe"), ("timeout", 0),
     ("prompt", "is {answer} right?"), ("max_concurrency", 0), ("max_concurrency", 1.5),
     ("max_tokens", True), ("max_tokens", 2**31), ("timeout", 1e12), ("timeout", math.inf),
     ("max_concurrency", 10**12), ("body", 3), ("max_retries", 5), ("url_", "x")],
)  # fmt: skip
def test_settings_that_no_judge_can_have_are_refused(name: str, value: object) -> None:
    """The error names the setting and a fix."""
    with pytest.raises(ValueError, match=rf"judge\.{name}: got .*; fix: "):
        read_judge({"url": URL, "model": "m", name: value}, CACHE)
