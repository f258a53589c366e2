"""Exact match minus costs, with hand-computed scores."""

import pytest

from search_r1.rewards import RewardInput, RewardScores, build_reward


@pytest.mark.parametrize(
    ("answer", "correct_only", "expected"),
    [("Paris", False, 2 - 3 * 0.1 - 0.25), ("Rome", False, -0.55), ("Rome", True, 0.0),
     ("Paris", True, 1.45)],
)  # fmt: skip
def test_searches_and_invalid_turns_cost(answer: str, correct_only: bool, expected: float) -> None:
    """Searches and invalid turns are charged, optionally for correct answers only."""
    text = f"<answer>{answer}</answer>"
    dialogue = RewardInput([text], [("policy", text)], ["Paris"], num_searches=3, num_invalid=1)
    scores = RewardScores(
        correct_answer=2.0, search_penalty=0.1, invalid_format=0.25,
        penalise_correct_only=correct_only,
    )  # fmt: skip
    out = build_reward("em_cost", scores)(dialogue)
    assert out.score == pytest.approx(expected)
    charged = answer == "Paris" or not correct_only
    assert out.components["search_cost"] == pytest.approx(0.3 * charged)
    assert out.components["invalid_cost"] == pytest.approx(0.25 * charged)
