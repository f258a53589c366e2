"""Batches drawn by weight, against the probabilities of drawing one row after the other."""

import itertools
from collections import Counter

import numpy as np
import pytest

from verl.errors import DataError
from verl.ext.weighted import WeightedSampler


def test_rows_are_drawn_by_weight() -> None:
    """The shares of all pairs are those of two draws without replacement."""
    weights, num = [1.0, 3.0, 0.0, 2.0], 20_000
    sampler = WeightedSampler(weights, 2, seed=1)
    counts = Counter(tuple(sampler.next_batch()) for _ in range(num))
    shares = np.array(weights) / 6
    for first, second in itertools.permutations(range(4), 2):
        rest = 1 - shares[first]
        expected = shares[first] * shares[second] / rest if rest else 0.0
        assert counts[first, second] / num == pytest.approx(expected, abs=0.015)


def test_a_batch_depends_on_seed_and_number_only() -> None:
    """A sampler that is resumed draws the batches that were left."""
    whole = WeightedSampler([1.0, 2.0, 5.0, 0.5], 2, seed=3)
    batches = [whole.next_batch() for _ in range(6)]
    first = WeightedSampler([1.0, 2.0, 5.0, 0.5], 2, seed=3)
    assert [first.next_batch() for _ in range(3)] == batches[:3]
    second = WeightedSampler([1.0, 2.0, 5.0, 0.5], 2, seed=3)
    second.load_state_dict(first.state_dict())
    assert [second.next_batch() for _ in range(3)] == batches[3:]
    assert batches != [WeightedSampler([1.0, 2.0, 5.0, 0.5], 2, seed=4).next_batch()] * 6


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_weights_may_have_any_scale(scale: float) -> None:
    """Only their proportions count."""
    drawn = WeightedSampler([scale, 2 * scale, 3 * scale], 2).next_batch()
    assert drawn == WeightedSampler([1.0, 2.0, 3.0], 2).next_batch()


def test_too_few_rows_and_other_data_are_refused() -> None:
    """A batch needs as many rows with a weight, and a checkpoint the same rows."""
    with pytest.raises(DataError, match=r"data\.weight_column"):
        WeightedSampler([0.0, 1.0, 0.0], 2)
    with pytest.raises(DataError, match="num_rows"):
        WeightedSampler([1.0, 1.0], 2).load_state_dict({"batch": 1, "num_rows": 3, "batch_size": 2})
    with pytest.raises(DataError, match="num_rows"):
        WeightedSampler([1.0, 1.0], 2).load_state_dict({"epoch": 0, "position": 4})
