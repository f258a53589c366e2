"""Normalisation, EM, F1 and cover-EM with hand-computed scores (correctness line 9)."""

from fractions import Fraction

import pytest

from search_r1.rewards import RewardInput, RewardScores, build_reward
from search_r1.rewards.f1 import token_f1
from search_r1.rewards.normalize import covers, matches_exactly, normalize_answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Beijing", "beijing"),
        ("  The   Great\tWall\n", "great wall"),
        ("U.S.A.", "usa"),
        ("a man, an apple & the end", "man apple end"),
        ("The The", ""),
        ("theatre and another", "theatre and another"),
        ("rock-'n'-roll", "rocknroll"),
        ("A-team", "ateam"),
        ("Curaçao", "curaçao"),
        ("3.14", "314"),
        ("北京", "北京"),
        ("?!", ""),
    ],
)
def test_line_09_normalisation_is_squad(text: str, expected: str) -> None:
    """Lower-case, then drop punctuation, articles and extra spaces."""
    assert normalize_answer(text) == expected


def test_line_09_exact_match_and_cover_by_hand() -> None:
    """Any accepted answer may match; cover-EM needs it as whole words of the normalised text."""
    assert matches_exactly("the  U.S.", ["America", "us"])
    assert not matches_exactly("the US of A", ["us"])
    assert covers("It is the Great Wall of China.", ["great wall"])
    assert covers("far north", ["north"]) and not covers("northern", ["north"])
    assert not covers("great big wall", ["great wall"])
    assert not covers("anything", ["The", ""])


@pytest.mark.parametrize(
    ("answer", "accepted", "expected"),
    [
        ("Barack Obama", ["barack obama"], Fraction(1)),
        # 1 common word, precision 1/2, recall 1/1.
        ("Barack Obama", ["Obama"], Fraction(2, 3)),
        # 2 common words, precision 2/4, recall 2/3.
        ("the big red brick house", ["red house there"], Fraction(4, 7)),
        # A repeated word counts as often as both texts have it: 1 common word, 1/3 and 1/2.
        ("no no no", ["no yes"], Fraction(2, 5)),
        # The best accepted answer counts.
        ("Obama", ["Barack Hussein Obama", "Barack Obama"], Fraction(2, 3)),
        ("Paris", ["London"], Fraction(0)),
        ("The The", ["The"], Fraction(0)),
        ("", ["x"], Fraction(0)),
    ],
)
def test_line_09_f1_by_hand(answer: str, accepted: list[str], expected: Fraction) -> None:
    """F1 is the harmonic mean of word precision and recall, maximised over accepted answers."""
    assert token_f1(answer, accepted) == pytest.approx(float(expected))


def one_turn(answer: str, *gold: str) -> RewardInput:
    """Build a dialogue with an answer and no search."""
    text = f"<answer>{answer}</answer>"
    return RewardInput([text], [("prompt", "Q"), ("policy", text)], list(gold))


def test_line_09_each_reward_scores_by_its_measure() -> None:
    """The same answer earns 0 by EM, 2/3 by F1 and 1 by cover-EM."""
    dialogue = one_turn("Barack Obama", "Obama")
    assert build_reward("em")(dialogue).score == 0.0
    assert build_reward("em", RewardScores(format_score=0.1))(dialogue).score == 0.1
    assert build_reward("f1")(dialogue).score == pytest.approx(2 / 3)
    assert build_reward("cover_em")(dialogue).score == 1.0
    assert build_reward("f1")(dialogue).components == pytest.approx(
        {"em": 0.0, "f1": 2 / 3, "cover_em": 1.0, "answered": 1.0}
    )


def test_format_score_is_for_answers_only() -> None:
    """A dialogue without an answer earns no format score."""
    silent = RewardInput(["hm"], [("policy", "hm")], ["x"])
    out = build_reward("em", RewardScores(format_score=0.1))(silent)
    assert (out.score, dict(out.components)) == (0.0, {"em": 0.0, "answered": 0.0})


def test_malformed_ground_truth_and_unknown_reward_are_refused() -> None:
    """A string or empty ground truth, and a misspelt reward, say what to do instead."""
    with pytest.raises(TypeError, match=r"write \['Paris'\]"):
        RewardInput([], [], "Paris")
    with pytest.raises(ValueError, match="'nq'"):
        RewardInput([], [], [], "nq")
    with pytest.raises(ValueError, match="'em_format'"):
        build_reward("em_fromat")
