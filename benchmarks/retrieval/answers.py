"""Compares the hits of two servers, up to the order of tied scores, and computes recall."""

from collections.abc import Sequence
from typing import Any

TOLERANCE = 1e-5
"""Scores that differ by less are ties, since float32 sums depend on the batch size."""

Hits = Sequence[dict[str, Any]]


def contents(hits: Hits) -> list[str]:
    """Return the texts of the documents, best first."""
    return [hit["document"]["contents"] for hit in hits]


def equal_up_to_ties(ours: Hits, theirs: Hits, tolerance: float = TOLERANCE) -> bool:
    """Whether both lists have the same texts in the same order, except for ties.

    At each rank the scores must agree. Where the texts differ, each text must occur in the other
    list with a tied score, or be tied with the other list's last hit.
    """
    if len(ours) != len(theirs):
        return False
    if any(abs(a["score"] - b["score"]) > tolerance for a, b in zip(ours, theirs, strict=True)):
        return False
    return _tied_within(ours, theirs, tolerance) and _tied_within(theirs, ours, tolerance)


def _tied_within(ours: Hits, theirs: Hits, tolerance: float) -> bool:
    """Whether each of our hits has the same rank in theirs, or differs only by a tie."""
    texts = contents(theirs)
    for rank, (hit, text) in enumerate(zip(ours, contents(ours), strict=True)):
        if text == texts[rank]:
            continue
        scores = [t["score"] for t, other in zip(theirs, texts, strict=True) if other == text]
        scores = scores or [theirs[-1]["score"]]
        if all(abs(hit["score"] - score) > tolerance for score in scores):
            return False
    return True


def count_differences(ours: Sequence[Hits | None], theirs: Sequence[Hits | None]) -> int:
    """Count the queries whose hits differ, or are missing on one side."""
    pairs = zip(ours, theirs, strict=True)
    return sum(a is None or b is None or not equal_up_to_ties(a, b) for a, b in pairs)


def recall(approximate: Sequence[Hits | None], exact: Sequence[Hits | None]) -> float:
    """Return the mean share of a query's exact documents, by id, in its approximate hits."""
    shares = []
    for hits, exact_hits in zip(approximate, exact, strict=True):
        expected = {hit["document"]["id"] for hit in exact_hits or ()}
        actual = {hit["document"]["id"] for hit in hits or ()}
        shares.append(len(expected & actual) / len(expected))
    return sum(shares) / len(shares)
