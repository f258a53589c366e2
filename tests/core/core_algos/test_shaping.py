"""Overlong penalty and advantage clipping, compared with their formulas."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.core_algos.shaping import overlong_penalty


def dapo_length_reward(length: int, longest: int, buffer: int) -> float:
    """Compute equation 13 of DAPO, with its three cases; 0 or negative."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return ((longest - buffer) - length) / buffer
    return -1.0


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=10),
    st.integers(1, 40),
    st.integers(0, 20),
    st.floats(0, 3),
)
def test_overlong_penalty_is_that_of_dapo(
    lengths: list[int], buffer: int, free: int, factor: float
) -> None:
    """It is the published formula with its three cases, negated and weighted."""
    got = overlong_penalty(torch.tensor(lengths), free + buffer, buffer, factor)
    expected = [-factor * dapo_length_reward(n, free + buffer, buffer) for n in lengths]
    assert got.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
