"""The k best of scores that come tile by tile, with ties by row whatever the tiling."""

import torch
from torch import Tensor

Best = tuple[Tensor, Tensor]
"""Scores (num_queries, k) float, best first, and their rows (num_queries, k) int64."""


def best_columns(scores: Tensor, k: int) -> Best:
    """The k highest of (num_queries, n) scores; equal scores by column, also at the k-th place.

    torch.topk leaves the order of equal scores open, so queries whose k-th and next score are
    equal are chosen again.
    """
    if k >= scores.shape[1]:
        return _stable(scores, torch.arange(scores.shape[1], device=scores.device))
    values, columns = scores.topk(k + 1, dim=1)
    is_tied = values[:, k - 1] == values[:, k]
    columns = columns[:, :k]
    for query in is_tied.nonzero().flatten().tolist():
        columns[query] = _lowest_columns(scores[query], values[query, k - 1], k)
    columns = columns.sort(dim=1).values
    return _stable(scores.gather(1, columns), columns)


def _lowest_columns(scores: Tensor, least: Tensor, k: int) -> Tensor:
    """The k columns of one query that score more than `least`, then the first that equal it."""
    above = (scores > least).nonzero().flatten()
    equal = (scores == least).nonzero().flatten()
    return torch.cat([above, equal[: k - len(above)]])


def _stable(values: Tensor, rows: Tensor) -> Best:
    """Both by falling value; equal values keep their order."""
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values, rows.expand_as(values).gather(1, order)


def merge(first: Best, second: Best, k: int) -> Best:
    """The k best of two lists of best rows, where all rows of `second` come after `first`'s."""
    values = torch.cat([first[0], second[0]], dim=1)
    values, rows = _stable(values, torch.cat([first[1], second[1]], dim=1))
    return values[:, :k], rows[:, :k]


def by_score_then_row(scores: Tensor, rows: Tensor, k: int) -> Best:
    """The k best of rows that come in any order."""
    rows, order = rows.sort(dim=1)
    values, rows = _stable(scores.gather(1, order), rows)
    return values[:, :k], rows[:, :k]
