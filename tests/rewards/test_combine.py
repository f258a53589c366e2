"""Sums of rewards and a user's own."""

from pathlib import Path

import pytest

from search_r1.rewards import RewardInput, build_reward

TEXT = "<answer>Barack Obama</answer>"
GIVEN = RewardInput([TEXT], [("policy", TEXT)], ["Obama"])


def test_a_weighted_sum_logs_every_part() -> None:
    """2 · F1 + 0.5 · cover-EM, with both scores and their components among the parts."""
    out = build_reward("em", weights={"f1": 2.0, "cover_em": 0.5})(GIVEN)
    assert out.score == pytest.approx(2 * 2 / 3 + 0.5)
    assert out.components["f1_score"] == pytest.approx(2 / 3)
    assert out.components["cover_em_score"] == 1.0
    assert out.components["em"] == 0.0


def test_a_users_own_function_scores(tmp_path: Path) -> None:
    """A file's function may give a number or a score with parts, alone or within a sum."""
    (tmp_path / "own.py").write_text(
        "from search_r1.rewards import RewardOutput\n"
        "def words(dialogue):\n    return len(dialogue.policy_texts[0].split())\n"
        "def parts(dialogue):\n    return RewardOutput(0.5, {'a': 1.0})\n"
    )
    assert build_reward(f"{tmp_path}/own.py:words")(GIVEN).score == 2.0
    assert build_reward(f"{tmp_path}/own.py:parts")(GIVEN).components == {"a": 1.0}
    both = build_reward("em", weights={f"{tmp_path}/own.py:words": -0.1, "f1": 1.0})(GIVEN)
    assert both.score == pytest.approx(-0.2 + 2 / 3)


@pytest.mark.parametrize(
    ("spec", "problem"), [("nowhere.py:f", "no file nowhere.py"), ("HERE:g", "no attribute .g.")]
)
def test_a_missing_function_is_named(tmp_path: Path, spec: str, problem: str) -> None:
    """The message says whether the file or the function is missing."""
    (tmp_path / "own.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=problem):
        build_reward(spec.replace("HERE", f"{tmp_path}/own.py"))
