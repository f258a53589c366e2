"""Groups and their sums, means, deviations and maxima, compared with plain loops."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.core.jagged_batches import CLOSE, Batch, batches, make_batch
from verl.core_algos.groups import Groups, dense_group_ids

IDS = st.sampled_from(["a", "b", 1, ("a", 1)])


def test_ids_are_compared_by_equality() -> None:
    """1, "1" and (1,) are three groups; equal entries of a tensor are one."""
    cpu = torch.device("cpu")
    assert dense_group_ids([1, "1", (1,), "1"], cpu).tolist() == [0, 1, 2, 1]
    assert dense_group_ids(torch.tensor([7, 7, 2]), cpu).tolist() == [0, 0, 1]


def test_ids_that_do_not_fit_are_refused() -> None:
    """Anything but one id per sequence is an error that says so."""
    batch = make_batch([[True], [True]])
    with pytest.raises(ValueError, match="got 1 group ids for 2 sequences"):
        Groups.of(["x"], batch.mask, batch.offsets)


class Sizes(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is computed."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.largest = max(self.largest, output.numel())
        return output


def test_memory_is_linear_in_the_number_of_sequences() -> None:
    """A table of all pairs would take gigabytes in a step of 20,000 sequences."""
    count = 100
    batch = make_batch([[True]] * count)
    groups = Groups.of([i // 5 for i in range(count)], batch.mask, batch.offsets)
    with Sizes() as sizes:
        groups.best_of_others(torch.arange(float(count)))
    assert sizes.largest <= count


@given(batches, st.data())
def test_group_figures_follow_loops(batch: Batch, data: st.DataObject) -> None:
    """Sums, sizes, (weighted) means, deviations and the others' maxima, over members only."""
    count = batch.num_seqs
    ids = data.draw(st.lists(IDS, min_size=count, max_size=count))
    numbers = st.lists(st.floats(-5, 5), min_size=count, max_size=count)
    x = torch.tensor(data.draw(numbers), dtype=torch.float64)
    weights = torch.tensor(data.draw(numbers), dtype=torch.float64).abs() + 0.1
    groups = Groups.of(ids, batch.mask, batch.offsets)
    is_member = [bool(own) for own in batch.policy_positions()]
    expected: dict[str, list[float]] = {
        name: [] for name in ("total", "mean", "heavy", "std", "best")
    }
    for i in range(count):
        members = [j for j in range(count) if ids[j] == ids[i] and is_member[j]]
        own, several = x[members].numpy(), len(members) > 1
        others = [float(x[j]) for j in members if j != i]
        expected["total"].append(float(own.sum()))
        expected["mean"].append(float(own.mean()) if several else 0.0)
        heavy = np.average(own, weights=weights[members].numpy()) if several else 0.0
        expected["heavy"].append(float(heavy))
        expected["std"].append(float(own.std(ddof=1)) if several else 1.0)
        expected["best"].append(max(others, default=0.0))
    got: dict[str, Tensor] = {
        "total": groups.total(x),
        "mean": groups.mean(x),
        "heavy": groups.mean(x, weights),
        "std": groups.std(x),
        "best": groups.best_of_others(x),
    }
    for name, figures in got.items():
        by_loop = torch.tensor(expected[name], dtype=torch.float64)
        torch.testing.assert_close(figures, by_loop, **CLOSE)
    sizes = [sum(m for j, m in enumerate(is_member) if ids[j] == ids[i]) for i in range(count)]
    assert groups.sizes(x).tolist() == sizes
    assert all(math.isfinite(figure) for figure in got["best"].tolist())
