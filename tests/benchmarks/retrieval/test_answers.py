"""Equality of answers up to ties, and recall."""

from typing import Any

import pytest

from benchmarks.retrieval.answers import differences, recall, same


def hits(*pairs: tuple[str, float]) -> list[dict[str, Any]]:
    return [{"document": {"id": t, "contents": t}, "score": s} for t, s in pairs]


ABC = hits(("a", 0.9), ("b", 0.8), ("c", 0.7))


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (ABC, True),
        (hits(("a", 0.9), ("b", 0.8)), False),
        (hits(("a", 0.9), ("b", 0.8), ("c", 0.71)), False),
        (hits(("b", 0.9), ("a", 0.8), ("c", 0.7)), False),
        (hits(("a", 0.9), ("b", 0.8), ("d", 0.7)), True),
        (hits(("a", 0.9), ("d", 0.8), ("c", 0.7)), False),
    ],
)
def test_same_needs_texts_in_order(other: list[dict[str, Any]], is_same: bool) -> None:
    """Other texts, another order or other scores differ; a tie at the cut does not."""
    assert same(ABC, other) is is_same


def test_tied_hits_may_change_places() -> None:
    """Hits whose scores differ by less than the tolerance may stand in any order."""
    one = hits(("a", 0.900001), ("b", 0.9), ("c", 0.7))
    two = hits(("b", 0.900001), ("a", 0.9), ("c", 0.7))
    assert same(one, two)


def test_differences_counts_missing_answers() -> None:
    """A query without an answer on one side is a difference."""
    assert differences([ABC, None, ABC], [ABC, ABC, hits(("x", 0.1))]) == 2


def test_recall_by_hand() -> None:
    """Two of three, then three of three."""
    found = [hits(("a", 1), ("b", 1), ("x", 1)), hits(("c", 1), ("b", 1), ("a", 1))]
    assert recall(found, [ABC, ABC]) == pytest.approx((2 / 3 + 1) / 2)
