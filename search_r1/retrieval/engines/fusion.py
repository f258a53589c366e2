"""Joins the rankings of one query by several engines."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

RANK_OFFSET = 60
"""What is added to each rank, so that the first few do not decide alone (reciprocal rank fusion:
Cormack, Clarke and Büttcher 2009)."""


def reciprocal(num_hits: int) -> list[float]:
    """Return the shares of the first hits of a ranking: 1 / (60 + rank)."""
    return [1 / (RANK_OFFSET + rank) for rank in range(1, num_hits + 1)]


def joined(rankings: Iterable[tuple[Sequence[int], Sequence[float]]]) -> list[tuple[int, float]]:
    """Return all rows of rankings (rows, shares) with the sums of their shares.

    The best comes first; rows with equal sums are in order.
    """
    sums: dict[int, float] = defaultdict(float)
    for rows, shares in rankings:
        for row, share in zip(rows, shares, strict=True):
            sums[row] += share
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))
