"""R1-Searcher's two stages, with hand-computed scores."""

import pytest

from search_r1.rewards import RewardInput, build_reward

VALID = "<think>a</think><answer>Barack Obama</answer>"
INVALID = "<answer>Barack Obama</answer>"


@pytest.mark.parametrize(
    ("text", "num_searches", "stage_1", "stage_2"),
    [(VALID, 0, 0.5, 2 / 3), (VALID, 2, 1.0, 2 / 3), (INVALID, 1, 0.5, 2 / 3 - 2),
     ("nothing", 0, 0.0, -2.0)],
)  # fmt: skip
def test_stages_score_as_published(
    text: str, num_searches: int, stage_1: float, stage_2: float
) -> None:
    """Stage 1 is 0.5 for a search plus 0.5 for the format; stage 2 is F1 minus 2 if invalid."""
    dialogue = RewardInput([text], [("policy", text)], ["Obama"], num_searches=num_searches)
    assert build_reward("r1_searcher_stage_1")(dialogue).score == pytest.approx(stage_1)
    assert build_reward("r1_searcher_stage_2")(dialogue).score == pytest.approx(stage_2)
