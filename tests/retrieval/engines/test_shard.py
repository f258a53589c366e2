"""Top-k selection with many equal scores, compared with a stable sort."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from search_r1.retrieval.engines.shard import merge_top_k, select_top_k, top_columns


def oracle(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the k best scores and their columns, sorted by descending score, then by column."""
    columns = np.lexsort((np.arange(len(scores)), -scores))[:k]
    return scores[columns], columns


@given(
    st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 60), st.integers(1, 70),
    st.integers(1, 6), st.integers(1, 25),
)  # fmt: skip
def test_tiles_merge_to_a_stable_sort(
    seed: int, num_queries: int, n: int, k: int, levels: int, tile: int
) -> None:
    """Tiles of any size give the k best by score, then row, also if most scores are equal."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels, (num_queries, n)).astype(np.float32)
    best = None
    for start in range(0, n, tile):
        values, columns = top_columns(torch.from_numpy(scores[:, start : start + tile]), k)
        top = values, columns + start
        best = top if best is None else merge_top_k(best, top, k)
    assert best is not None
    for query in range(num_queries):
        values, rows = oracle(scores[query], k)
        assert best[0][query].tolist() == values.tolist()
        assert best[1][query].tolist() == rows.tolist()


@pytest.mark.parametrize("k", [1, 4, 9])
def test_rows_in_any_order_are_ranked_by_score_then_row(k: int) -> None:
    """Candidates may be given in any order."""
    rows = torch.tensor([[7, 1, 5, 3, 0]])
    scores = torch.tensor([[2.0, 2.0, 9.0, 2.0, -1.0]])
    values, best = select_top_k(scores, rows, k)
    assert best.tolist() == [[5, 1, 3, 7, 0][:k]]
    assert values.tolist() == [[9.0, 2.0, 2.0, 2.0, -1.0][:k]]
