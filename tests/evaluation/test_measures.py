"""Measures, checked with hand-computed values and loops."""

import itertools
import math

import pytest

from search_r1.evaluation.measures import (
    MEASURES,
    WRONG,
    is_near,
    kind_of_wrong,
    measure_sums,
    pass_at_k,
)  # fmt: skip
from search_r1.evaluation.samples import Sample
from tests.evaluation.scripted import sample, search

SAMPLES = [
    sample(em=1.0, f1=1.0, searches=(search("thing zero", has_answer=True), search("other"))),
    sample(em=0.0, f1=0.4, searches=(search("Thing zero!"), search("thing zero")), judge=1.0,
           truncated_turns=2, invalid_actions=1, turns=3, seconds=2.0),
    sample(em=1.0, f1=1.0, judge=0.5, turns=1, seconds=1.0),
    sample(em=0.0, f1=0.0, searches=(search("what is THING 0", has_answer=True),),
           status="out_of_turns", policy_tokens=40),
]  # fmt: skip
BY_HAND = {
    "em": 2 / 4,
    "f1": 2.4 / 4,
    "judge": 1.5 / 2,
    "answered": 3 / 4,
    "searches": 5 / 4,
    "turns": 8 / 4,
    "policy_tokens": 100 / 4,
    "observation_tokens": 30,
    "tokens": (3 * (10 + 20 + 30) + 10 + 40 + 30) / 4,
    "seconds": 3 / 2,
    "searches_per_correct": 5 / 2,
    "tokens_per_correct": 100 / 2,
    "answer_in_documents": 2 / 4,
    "em_given_hit": 1 / 2,
    "em_given_miss": 1 / 2,
    "wrong_no_search": 0.0,
    "wrong_one_search": 0.0,
    "wrong_not_found": 1 / 4,
    "wrong_not_used": 1 / 4,
    "novel_queries": 4 / 5,
    "repeated_queries": 1 / 5,
    "truncated": 1 / 4,
    "out_of_budget": 0.0,
    "out_of_turns": 1 / 4,
    "invalid": 1 / 8,
    "failed": 0.0,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_measures_are_those_worked_out_by_hand(name: str) -> None:
    """Every measure of four dialogues has its hand-computed value."""
    part, whole = measure_sums(SAMPLES)[name]
    assert part / whole == pytest.approx(BY_HAND[name])


def test_every_measure_has_been_worked_out() -> None:
    """All measures are covered above, except cover-EM, which the tests of rewards cover."""
    assert {m.name for m in MEASURES} - {"cover_em"} == set(BY_HAND)


def test_right_wrong_and_failed_samples_are_all_samples() -> None:
    """Each wrong sample is counted in one kind, by its searches and by what they found."""
    more = [
        sample(em=0.0, searches=()),
        sample(em=0.0, searches=(search("a"),)),
        sample(em=0.0, searches=(), status="failed"),
    ]
    assert [kind_of_wrong(s) for s in [*SAMPLES, *more]] == [
        "", "not_found", "", "not_used", "no_search", "one_search", "",
    ]  # fmt: skip
    sums = measure_sums([*SAMPLES, *more])
    parts = ["em", "failed", *(f"wrong_{kind}" for kind in WRONG)]
    assert sum(sums[name][0] for name in parts) == len(SAMPLES) + len(more)


def test_conditions_split_the_correct_answers() -> None:
    """Correct answers with and without a hit add up to all correct answers."""
    found = measure_sums(SAMPLES)
    assert found["em_given_hit"][0] + found["em_given_miss"][0] == found["em"][0]
    assert found["em_given_hit"][1] + found["em_given_miss"][1] == len(SAMPLES)


@pytest.mark.parametrize(
    ("query", "near"),
    [
        ("What is thing 0?", True),
        ("what is the thing 0", True),
        ("thing 0", False),
        ("who made thing 0", False),
        ("?", False),
    ],
)
def test_a_query_that_repeats_the_question_is_near(query: str, near: bool) -> None:
    """Case, punctuation and articles do not make a query new; missing words do."""
    assert is_near(query, "What is thing 0?") is near


@pytest.mark.parametrize(("n", "c"), [(5, 0), (5, 1), (5, 3), (6, 5), (4, 4)])
def test_pass_at_k_is_the_mean_over_all_choices(n: int, c: int) -> None:
    """pass@k is the share of k-subsets with a correct sample."""
    for k in range(1, n + 1):
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_1_is_em() -> None:
    """pass@1 equals EM."""
    found = measure_sums(SAMPLES, [1, 4])
    assert found["pass@1"][0] == found["em"][0] / found["em"][1]
    assert found["pass@4"] == (1.0, 1.0)


def test_samples_survive_their_line() -> None:
    """Samples are written and read back unchanged, including odd characters."""
    odd = sample(answer='a\u2028b\n"c"', searches=(search("né"),), error="x")
    assert Sample.from_json(odd.to_json()) == odd
    assert "\n" not in odd.to_json()


def test_a_measure_without_whole_is_undefined_not_zero() -> None:
    """Measures whose whole is 0 are undefined."""
    found = measure_sums([sample(em=0.0)])
    assert found["searches_per_correct"][1] == 0
    assert found["judge"] == (0.0, 0.0)
    assert not math.isnan(found["em"][0])
