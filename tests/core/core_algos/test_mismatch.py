"""Importance weights for the mismatch with the engine's log-probs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.core_algos.mismatch import importance_weights

ROWS = st.lists(st.tuples(st.floats(-3, 3), st.integers(0, 2)), max_size=15)


LEVELS = ("none", "token", "sequence", "geometric")


def ratio(level: str, rows: list[tuple[float, int]], row: tuple[float, int]) -> float:
    """Compute π_old/π_rollout of one token of `rows` (log-ratio, sequence), by a loop."""
    own = [d for d, i in rows if i == row[1]]
    total = {"none": 0.0, "token": row[0], "sequence": sum(own), "geometric": sum(own) / len(own)}
    return math.exp(total[level])


@pytest.mark.parametrize("mask_level", [None, *LEVELS[1:]])
@pytest.mark.parametrize("level", LEVELS)
@given(rows=ROWS)
def test_weights_are_clipped_ratios(
    level: str, mask_level: str | None, rows: list[tuple[float, int]]
) -> None:
    """Ratios are clipped above; 0 where the mask's ratio is outside its bounds."""
    log_ratio = torch.tensor([d for d, _ in rows], dtype=torch.float64)
    ids = torch.tensor([i for _, i in rows], dtype=torch.int64)
    given = (log_ratio, torch.zeros_like(log_ratio), ids, level)
    cut = importance_weights(*given, 2.0)
    masked = importance_weights(*given, 2.0, 4.0, mask_level=mask_level)
    narrow = importance_weights(*given, 2.0, 1.2, mask_level=mask_level, mask_floor=0.1)
    for i, row in enumerate(rows):
        own, other = ratio(level, rows, row), ratio(mask_level or level, rows, row)
        assert cut[i].item() == pytest.approx(min(own, 2.0))
        assert masked[i].item() == pytest.approx(min(own, 2.0) if 0.25 <= other <= 4.0 else 0.0)
        assert narrow[i].item() == pytest.approx(min(own, 2.0) if 0.1 <= other <= 1.2 else 0.0)


def test_unknown_level_is_refused() -> None:
    """The message names the known levels."""
    nothing = torch.zeros(0)
    with pytest.raises(ValueError, match="none, token, sequence, geometric"):
        importance_weights(nothing, nothing, nothing.long(), "turn", 2.0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_ratio_beyond_float32_is_bounded(level: str) -> None:
    """The log-ratio is bounded to ±20 whatever the threshold, since exp(200) is infinite."""
    log_ratio, ids = torch.tensor([-200.0, 200.0]), torch.tensor([0, 1])
    got = importance_weights(log_ratio, torch.zeros(2), ids, level, 1e10)
    assert got.tolist() == pytest.approx([math.exp(-20), math.exp(20)])


@pytest.mark.parametrize("mask_floor", [None, 1.0])
def test_a_ratio_at_the_bounds_of_a_mask_is_within(mask_floor: float | None) -> None:
    """If engine and trainer agree, no mask drops a token."""
    zeros, ids = torch.zeros(2), torch.tensor([0, 1])
    got = importance_weights(zeros, zeros, ids, "token", 2.0, 1.0, mask_floor=mask_floor)
    assert got.tolist() == [1.0, 1.0]
