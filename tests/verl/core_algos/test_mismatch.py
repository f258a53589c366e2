"""Importance weights against the engine's log-probs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.verl.jagged_batches import fast
from verl.core_algos.mismatch import importance_weights

ROWS = st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 2)), max_size=15)


@pytest.mark.parametrize("level", ["none", "token", "sequence"])
@fast
@given(rows=ROWS)
def test_weights_are_truncated_ratios(level: str, rows: list[tuple[float, int]]) -> None:
    """min(ratio, threshold) by a loop; outside the mask's bounds 0."""
    log_ratio = torch.tensor([d for d, _ in rows], dtype=torch.float64)
    ids = torch.tensor([i for _, i in rows], dtype=torch.int64)
    zeros = torch.zeros_like(log_ratio)
    got = importance_weights(log_ratio, zeros, ids, level, 2.0)
    masked = importance_weights(log_ratio, zeros, ids, level, 2.0, 4.0)
    for weight, kept, (d, i) in zip(got.tolist(), masked.tolist(), rows, strict=True):
        total = {"none": 0.0, "token": d, "sequence": sum(x for x, j in rows if j == i)}[level]
        ratio = math.exp(total)
        assert weight == pytest.approx(min(ratio, 2.0))
        assert kept == pytest.approx(min(ratio, 2.0) if 0.25 <= ratio <= 4.0 else 0.0)


def test_unknown_level_is_refused() -> None:
    """The message names the known levels."""
    nothing = torch.zeros(0)
    with pytest.raises(ValueError, match="none, token, sequence"):
        importance_weights(nothing, nothing, nothing.long(), "turn", 2.0)
