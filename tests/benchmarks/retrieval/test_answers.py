"""Equality of answers up to ties, and recall."""

from typing import Any

import pytest

from benchmarks.retrieval.answers import count_differences, equal_up_to_ties, recall


def hits(*pairs: tuple[str, float]) -> list[dict[str, Any]]:
    return [{"document": {"id": t, "contents": t}, "score": s} for t, s in pairs]


ABC = hits(("a", 0.9), ("b", 0.8), ("c", 0.7))


@pytest.mark.parametrize(
    ("other", "is_equal"),
    [
        (ABC, True),
        (hits(("a", 0.9), ("b", 0.8)), False),
        (hits(("a", 0.9), ("b", 0.8), ("c", 0.71)), False),
        (hits(("b", 0.9), ("a", 0.8), ("c", 0.7)), False),
        (hits(("a", 0.9), ("b", 0.8), ("d", 0.7)), True),
        (hits(("a", 0.9), ("d", 0.8), ("c", 0.7)), False),
    ],
)
def test_equal_hits_have_the_same_texts_in_order(
    other: list[dict[str, Any]], is_equal: bool
) -> None:
    """Other texts, another order or other scores differ; a tie with the last hit does not."""
    assert equal_up_to_ties(ABC, other) is is_equal


def test_tied_hits_may_be_in_any_order() -> None:
    """Hits whose scores differ by less than the tolerance are interchangeable."""
    first = hits(("a", 0.900001), ("b", 0.9), ("c", 0.7))
    second = hits(("b", 0.900001), ("a", 0.9), ("c", 0.7))
    assert equal_up_to_ties(first, second)


def test_differences_counts_missing_answers() -> None:
    """A query without hits on one side counts as a difference."""
    assert count_differences([ABC, None, ABC], [ABC, ABC, hits(("x", 0.1))]) == 2


def test_recall_is_the_mean_over_the_queries() -> None:
    """One query has two of its three exact documents, the other has all three."""
    approximate = [hits(("a", 1), ("b", 1), ("x", 1)), hits(("c", 1), ("b", 1), ("a", 1))]
    assert recall(approximate, [ABC, ABC]) == pytest.approx((2 / 3 + 1) / 2)
