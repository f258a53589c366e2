"""Layers with a state, called for each run of a packed row."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from verl.training.attention import SequenceBounds
from verl.training.mixers import CurrentRow, RunByRun

SPANS = ((0, 3), (3, 5), (3, 4), (0, 2), (2, 6), (0, 1))
"""A prompt with two responses, a prompt with one, and a sequence alone."""


def running_sum(x: Tensor, *, factor: Tensor, offset: float) -> tuple[Tensor, str]:
    return x.cumsum(1) * factor + offset, "state"


class SplitCounter(TorchFunctionMode):
    """Counts the calls that split a tensor."""

    num_splits = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_splits += func is Tensor.split
        return func(*args, **(kwargs or {}))


def test_each_run_follows_its_prompt_alone() -> None:
    """The row of results is that of a loop over runs, which joins each with its prompt."""
    bounds = SequenceBounds.of(SPANS, torch.device("cpu"))
    x, factor = torch.randn(1, 13, 4), torch.randn(1, 13, 1)
    expected, begin, prompt = [], 0, slice(0, 0)
    for start, end in SPANS:
        own = slice(begin, begin + end - start)
        begin = own.stop
        if start == 0:
            prompt = own
        rows = [*range(prompt.start, prompt.stop), *([] if start == 0 else range(own.start, begin))]
        joined, _ = running_sum(x[:, rows], factor=factor[:, rows], offset=2.0)
        expected.append(joined[:, len(rows) - (end - start) :])
    row = CurrentRow(bounds)
    result, other = RunByRun(running_sum, row)(x, factor=factor, offset=2.0)
    assert torch.equal(result, torch.cat(expected, dim=1))
    assert other == "state"


def test_a_row_is_split_once_whatever_the_number_of_runs() -> None:
    """Not once for each run, which is quadratic in the sequences of a row."""
    bounds = SequenceBounds.of([(0, 1)] * 50, torch.device("cpu"))
    with SplitCounter() as counter:
        RunByRun(lambda x: x * 2, CurrentRow(bounds))(torch.randn(1, 50, 2))
    assert counter.num_splits == 1
