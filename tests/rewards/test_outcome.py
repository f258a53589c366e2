"""Each reward says whether the outcome is right, apart from what shapes its score."""

import pytest

from search_r1.rewards import LLM_JUDGE, REWARDS, RewardInput, RewardOutput, build_batch_reward
from search_r1.rewards.own import OwnRewardError, wrap_user_reward
from search_r1.rewards.registry import OUTCOMES

GOLD = "the river Seine"
ANSWERS = {"exact": GOLD, "covering": f"it is {GOLD}", "partial": "a river", "wrong": "Rhine"}


def is_right(kind: str, name: str, weights: dict[str, float] | None = None) -> bool | None:
    text = f"<answer>{ANSWERS[kind]}</answer>"
    rule = build_batch_reward(name, weights=weights)
    return rule([RewardInput([text], [("policy", text)], [GOLD])])[0].is_right


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("em", {"exact"}),
        ("em_format", {"exact"}),
        ("em_cost", {"exact"}),
        ("cover_em", {"exact", "covering"}),
        ("f1", {"exact", "covering", "partial"}),
        ("r1_searcher_stage_2", {"exact", "covering", "partial"}),
    ],
)
def test_a_built_in_reward_is_right_by_its_own_measure(name: str, right: set[str]) -> None:
    assert {kind for kind in ANSWERS if is_right(kind, name)} == right


def test_every_built_in_reward_has_an_outcome_or_none_by_intent() -> None:
    """The first stage of R1-Searcher rewards no answer."""
    assert {*REWARDS, LLM_JUDGE} - OUTCOMES.keys() == {"r1_searcher_stage_1"}
    assert is_right("exact", "r1_searcher_stage_1") is None


@pytest.mark.parametrize(
    ("weights", "right"),
    [
        ({"em": 1.0, "f1": 0.2}, {"exact"}),
        ({"f1": 1.0, "r1_searcher_stage_1": 0.2}, {"exact", "covering", "partial"}),
        ({"em": 1.0, "cover_em": 0.5}, {"exact", "covering"}),
        ({"em": 0.0, "f1": 1.0}, {"exact", "covering", "partial"}),
    ],
)
def test_f1_shapes_a_sum_that_has_an_exact_outcome(
    weights: dict[str, float], right: set[str]
) -> None:
    assert {kind for kind in ANSWERS if is_right(kind, "em", weights)} == right


def test_an_own_function_may_say_what_is_right() -> None:
    """Unknown unless the function says so."""
    dialogue = RewardInput(["x"], [("policy", "x")], [GOLD])
    for output in (RewardOutput(0.5), RewardOutput(0.5, {}, False), RewardOutput(0.5, {}, True)):
        rule = wrap_user_reward("mine", lambda _, output=output: output)
        assert rule([dialogue]) == [output]


@pytest.mark.parametrize("value", ["no", 0.5, float("nan"), [True]])
def test_an_outcome_that_is_none_is_a_failure(value: object) -> None:
    """Any other value would be true, or leave the group without a gate, in silence."""
    dialogue = RewardInput(["x"], [("policy", "x")], [GOLD])
    rule = wrap_user_reward("mine", lambda _: RewardOutput(0.5, {}, value))  # type: ignore[arg-type]
    with pytest.raises(OwnRewardError, match="is_right"):
        rule([dialogue])
