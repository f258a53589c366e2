"""Exact match and F1 minus costs, with hand-computed scores."""

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


@pytest.mark.parametrize(
    ("text", "num_searches", "expected"),
    [("<answer>Paris</answer>", 1, 1.0), ("<answer>Paris</answer>", 0, 0.9),
     ("<answer>Paris in spring</answer>", 2, 0.5), ("<answer>Rome</answer>", 0, -0.1),
     ("<think>?</think>", 3, -0.25), ("<think>?</think>", 0, -0.35)],
)  # fmt: skip
def test_what_a_dialogue_lacks_costs(text: str, num_searches: int, expected: float) -> None:
    """F1, minus 0.1 without a search and 0.25 without an answer; F1 alone by default."""
    dialogue = RewardInput([text], [("policy", text)], ["Paris"], num_searches=num_searches)
    out = build_reward("f1", RewardScores(no_search=0.1, no_answer=0.25))(dialogue)
    assert out.score == pytest.approx(expected)
    assert out.score == pytest.approx(out.components["f1"] - out.components["action_cost"])
    plain = build_reward("f1")(dialogue)
    assert plain.score == plain.components["f1"]
    assert "action_cost" not in plain.components
