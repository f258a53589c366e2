"""Layers that carry a state along their tokens: convolutions, recurrences and linear attention.

In a packed row such a layer would carry the state of one sequence into the next. So it is called
once for each run of the row, with what it follows in front of it, and the results are put together
again. It computes a shared prompt for each response; everything else in a block computes it once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from verl.training.attention import SequenceBounds

STATE_NAMES = ("A_log", "slope_rate")
"""Parameters and buffers of layers that decay a state."""


@dataclass
class CurrentRow:
    """The bounds of the row that a model computes, or computes again in its backward."""

    bounds: SequenceBounds | None = None


@dataclass
class RunByRun:
    """The forward of a mixer: calls `forward` for each run of the current row."""

    forward: Callable[..., Any]
    row: CurrentRow

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it for each run, with its part of the inputs of shape (1, num_tokens, …).

        Returns what `forward` returns for a row; of several results, the first is a row.
        """
        # Not all families pass the bounds on; kernels refuse what they do not know.
        bounds = kwargs.pop("bounds", None) or self.row.bounds
        assert bounds is not None, "set CurrentRow.bounds before the model's forward"
        leaves, tree = tree_flatten((args, kwargs))
        runs = [_runs(x, bounds) if _is_row(x, bounds) else repeat(x) for x in leaves]
        results = []
        for length, *own in zip(bounds.lengths, *runs, strict=False):
            own_args, own_kwargs = tree_unflatten(own, tree)
            result = self.forward(*own_args, **own_kwargs)
            output, *others = result if isinstance(result, tuple) else (result,)
            results.append((output[:, -length:], *others))
        joined = torch.cat([result[0] for result in results], dim=1)
        return (joined, *results[-1][1:]) if isinstance(result, tuple) else joined


def _is_row(x: Any, bounds: SequenceBounds) -> bool:
    """Whether `x` has shape (1, num_tokens, …)."""
    return isinstance(x, Tensor) and x.dim() > 1 and x.shape[:2] == (1, sum(bounds.lengths))


def _runs(x: Tensor, bounds: SequenceBounds) -> list[Tensor]:
    """Return the rows of each run of `x` (1, num_tokens, …), after those that it follows."""
    parts = x.split(bounds.lengths, dim=1)
    return [torch.cat([parts[number] for number in path], dim=1) for path in bounds.paths]


def is_mixer(module: nn.Module) -> bool:
    """Whether the module itself has a convolution, or a state that decays."""
    has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
    return has_convolution or any(hasattr(module, name) for name in STATE_NAMES)


def mixers(trunk: nn.Module) -> list[nn.Module]:
    """Return the mixers of a model that are not inside another one."""
    found: list[nn.Module] = []

    def collect(module: nn.Module) -> None:
        for child in module.children():
            if is_mixer(child):
                found.append(child)
            else:
                collect(child)

    collect(trunk)
    return found


def current_row(trunk: nn.Module) -> CurrentRow:
    """Return the row of a trunk; at the first call, let its mixers run sequence by sequence."""
    row = vars(trunk).get("current_row")
    if row is None:
        row = CurrentRow()
        for mixer in mixers(trunk):
            mixer.forward = RunByRun(mixer.forward, row)
        vars(trunk)["current_row"] = row
    return row
