"""Layers that carry a state along their tokens: convolutions, recurrences and linear attention.

In a packed row such a layer would carry the state of one sequence into the next. So it is called
once for each run of the row, with the run's prompt in front of it, and the results are put together
again. It computes a shared prompt for each response; everything else in a block computes it once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

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
        assert bounds.sp_group is None, "a mixer's row cannot be divided over ranks"
        num_tokens, results = sum(bounds.lengths), []
        for number, length in enumerate(bounds.lengths):

            def run_of(x: Tensor, number: int = number) -> Tensor:
                is_row = x.dim() > 1 and x.shape[:2] == (1, num_tokens)
                return _with_prompt(x, bounds, number) if is_row else x

            own_args, own_kwargs = tree_map_only(Tensor, run_of, (args, kwargs))
            result = self.forward(*own_args, **own_kwargs)
            output, *others = result if isinstance(result, tuple) else (result,)
            results.append((output[:, -length:], *others))
        joined = torch.cat([result[0] for result in results], dim=1)
        return (joined, *results[-1][1:]) if isinstance(result, tuple) else joined


def _with_prompt(x: Tensor, bounds: SequenceBounds, number: int) -> Tensor:
    """Return the rows of run `number` of `x` (1, num_tokens, …), after those of its prompt."""
    parts: tuple[Tensor, ...] = x.split(bounds.lengths, dim=1)
    if bounds.spans[number][0] == 0:
        return parts[number]
    prompt = next(i for i in range(number, -1, -1) if bounds.spans[i][0] == 0)
    return torch.cat([parts[prompt], parts[number]], dim=1)


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
