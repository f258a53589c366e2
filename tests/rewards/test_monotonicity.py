"""No accepted options make a reward prefer wrong answers, more searches or invalid formats."""

import dataclasses
import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from search_r1.rewards import (
    REWARDS,
    JudgeOptions,
    RewardFn,
    RewardInput,
    RewardScores,
    build_judge,
    build_reward,
)
from search_r1.rewards.interface import Origin
from search_r1.scoring_options import SCORES
from tests.rewards.judge.server import judge_server

GOLD = "Barack Obama"
AMOUNTS = [f.name for f in dataclasses.fields(RewardScores) if f.type is float]
BREAKS = ("none", "no answer", "text outside", "no thought", "own documents")


@dataclass(frozen=True)
class Case:
    """Properties of a dialogue that rewards depend on."""

    is_correct: bool = True
    wrong: str = "Angela Merkel"
    is_found: bool = False
    num_searches: int = 0
    num_invalid: int = 0
    broken: str = "none"

    def dialogue(self) -> RewardInput:
        answer = GOLD if self.is_correct else self.wrong
        last = {
            "none": f"<think>t</think><answer>{answer}</answer>",
            "no answer": f"<think>t</think>{answer}",
            "text outside": f"<think>t</think>so<answer>{answer}</answer>",
            "no thought": f"<answer>{answer}</answer>",
            "own documents": f"<think>t<information>d</information><answer>{answer}</answer>",
        }[self.broken]
        segments: list[tuple[Origin, str]] = []
        for number in range(self.num_searches):
            document = GOLD if self.is_found and not number else "nothing"
            segments += [
                ("policy", "<think>t</think><search>q</search>"),
                ("observation", f"<information>{document}</information>"),
            ]
        segments.append(("policy", last))
        policy = [text for origin, text in segments if origin == "policy"]
        return RewardInput(policy, segments, [GOLD], "", self.num_searches, self.num_invalid)


cases = st.builds(
    Case, st.booleans(), st.sampled_from(["Angela Merkel", "Obama", "Mr Barack Obama", "?"]),
    st.booleans(), st.integers(0, 4), st.integers(0, 3), st.sampled_from(BREAKS),
)  # fmt: skip
amounts = st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0]) | st.floats(0, 1) | st.floats()
weights = st.dictionaries(st.sampled_from(list(REWARDS)), amounts, min_size=1, max_size=3)


@st.composite
def accepted_rewards(draw: st.DrawFn, name: str) -> RewardFn:
    """Draw a reward with accepted options; `sum` is a weighted sum."""
    values = st.floats(0, 1) if name == "sum" else amounts
    drawn = {option: draw(values) for option in AMOUNTS if name in (SCORES[option], "sum")}
    try:
        scores = RewardScores(**drawn, penalise_correct_only=draw(st.booleans()))
        if name == "sum":
            return build_reward("", scores, draw(weights))
        return build_reward(name, scores)
    except ValueError:
        assume(False)
        raise


def is_no_more(worse: float, better: float) -> bool:
    """Whether a score is at most another, up to rounding."""
    return worse <= better or math.isclose(worse, better, rel_tol=1e-9, abs_tol=1e-9)


def assert_monotone(reward: RewardFn, case: Case, pays_first_search: bool) -> None:
    def score(**changes: object) -> float:
        return reward(replace(case, **changes).dialogue()).score  # type: ignore[arg-type]

    assert is_no_more(score(is_correct=False), score(is_correct=True))
    if case.num_searches or not pays_first_search:
        is_found = case.is_found and case.num_searches > 0
        searches = case.num_searches + 1
        assert is_no_more(score(num_searches=searches, is_found=is_found), score())
    assert is_no_more(score(num_invalid=case.num_invalid + 1), score())
    for broken in BREAKS:
        assert is_no_more(score(broken=broken), score(broken="none"))


@pytest.mark.parametrize("name", [*REWARDS, "sum"])
@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(case=cases, data=st.data())
def test_no_reward_inverts(name: str, case: Case, data: st.DataObject) -> None:
    """A right answer, fewer searches and a valid format never score less, all else being equal.

    R1-Searcher's first stage and F1's `no_search` reward the first search, but no further ones.
    """
    reward = data.draw(accepted_rewards(name))
    assert_monotone(reward, case, pays_first_search=name in ("r1_searcher_stage_1", "f1", "sum"))


@pytest.mark.parametrize("verdict", ["0.3", "7", "nan"])
def test_no_judge_inverts(verdict: str) -> None:
    """The judge's reward is monotone for any reply."""
    with judge_server(lambda n, body: verdict) as server:
        options = JudgeOptions(server.url, "m", verdict="score", max_retries=0)
        judge = build_judge(options)

        def reward(dialogue: RewardInput) -> object:
            return judge([dialogue])[0]

        assert_monotone(reward, Case(num_searches=2), False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scores", "problem"),
    [
        *(({name: -0.1}, f"{name}: got -0.1, expected 0 or more") for name in AMOUNTS),
        *(({name: math.nan}, f"{name}: got nan") for name in AMOUNTS),
        *(({name: math.inf}, f"{name}: got inf") for name in AMOUNTS),
        ({"search_penalty": -0.1}, "fix: search_penalty=0.1"),
        ({"invalid_format": -5}, "fix: invalid_format=5"),
        ({"correct_answer": -1.0}, "fix: correct_answer=1.0"),
        ({"format_score": 1.5}, "at most 1"),
        ({"structure_format_score": 0.8, "retrieval_score": 0.3}, "at most 1"),
        ({"structure_format_score": 0.6, "final_format_score": 0.5}, "at most 1"),
        ({"final_format_score": 0.1}, "an invalid dialogue must not score more"),
    ],
)
def test_scores_that_would_invert_are_refused(scores: dict[str, float], problem: str) -> None:
    """The message names the option, its value and the fix."""
    with pytest.raises(ValueError) as refused:
        RewardScores(**scores)  # type: ignore[arg-type]
    assert problem in str(refused.value)


@pytest.mark.parametrize("weight", [-0.5, math.nan, math.inf])
def test_weights_that_would_invert_are_refused(weight: float) -> None:
    """Built-in rewards cannot have negative or infinite weights."""
    with pytest.raises(ValueError, match=f"weights: got {weight} for f1"):
        build_reward("", weights={"em": 1.0, "f1": weight})
