"""Whether two servers give equal answers, up to the order of equal scores; and recall. Pure."""

from collections.abc import Sequence
from typing import Any

TOLERANCE = 1e-5
"""Scores nearer than this are ties: float32 sums differ with the size of a batch."""

Hits = Sequence[dict[str, Any]]


def contents(hits: Hits) -> list[str]:
    """The texts of the documents found, best first."""
    return [hit["document"]["contents"] for hit in hits]


def same(ours: Hits, theirs: Hits, tolerance: float = TOLERANCE) -> bool:
    """Whether both lists hold the same texts in the same order, ties aside.

    At each rank the scores must agree; where the texts differ, each must stand elsewhere in the
    other list with a tied score, or be tied with the other list's last.
    """
    if len(ours) != len(theirs):
        return False
    if any(abs(a["score"] - b["score"]) > tolerance for a, b in zip(ours, theirs, strict=True)):
        return False
    return _tied_within(ours, theirs, tolerance) and _tied_within(theirs, ours, tolerance)


def _tied_within(ours: Hits, theirs: Hits, tolerance: float) -> bool:
    """Whether each of our hits is theirs at its rank, or excused by a tie."""
    texts = contents(theirs)
    for rank, (hit, text) in enumerate(zip(ours, contents(ours), strict=True)):
        if text == texts[rank]:
            continue
        rivals = [t["score"] for t, other in zip(theirs, texts, strict=True) if other == text]
        rivals = rivals or [theirs[-1]["score"]]
        if all(abs(hit["score"] - rival) > tolerance for rival in rivals):
            return False
    return True


def differences(ours: Sequence[Hits | None], theirs: Sequence[Hits | None]) -> int:
    """Queries whose answers are missing on a side or are not the same."""
    pairs = zip(ours, theirs, strict=True)
    return sum(a is None or b is None or not same(a, b) for a, b in pairs)


def recall(found: Sequence[Hits | None], exact: Sequence[Hits | None]) -> float:
    """Mean share of the exact documents, by id, that were found."""
    shares = []
    for some, best in zip(found, exact, strict=True):
        wanted = {hit["document"]["id"] for hit in best or ()}
        got = {hit["document"]["id"] for hit in some or ()}
        shares.append(len(wanted & got) / len(wanted))
    return sum(shares) / len(shares)
