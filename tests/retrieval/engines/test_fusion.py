"""Joined rankings: the sums of a plain loop, ties by row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.retrieval.engines.fusion import joined, reciprocal

RANKING = st.lists(st.integers(0, 9), unique=True, max_size=8)


@given(st.lists(RANKING, max_size=3))
def test_rows_have_the_sum_of_their_reciprocal_ranks(rankings: list[list[int]]) -> None:
    found = joined((rows, reciprocal(len(rows))) for rows in rankings)
    expected = {
        row: sum(1 / (61 + rows.index(row)) for rows in rankings if row in rows)
        for rows in rankings for row in rows
    }  # fmt: skip
    assert dict(found) == pytest.approx(expected)
    assert found == sorted(found, key=lambda item: (-item[1], item[0]))
