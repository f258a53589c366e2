"""Whether the weights that vLLM read from a model's files are numbers.

An engine of a training run reads none: it is sent those of the ranks, which were checked there.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from verl.model_files import is_finite, refuse_non_finite


class WeightCheck:
    """The part in vLLM's worker, for `verl.rollout.weight_loading.WeightLoading`."""

    model_runner: Any

    def non_finite_weights(self) -> list[str]:
        """Return the names of weights with NaN or infinite values; on CPU vLLM hides some."""
        named = self.model_runner.get_model().named_parameters()
        return [name for name, values in named if not is_finite(values)]


async def check_weights(call: Callable[[str], Awaitable[list[list[str]]]], model: str) -> None:
    """Raise ModelError if a weight is not finite; `call` calls a method of all workers."""
    names = set(itertools.chain(*await call("non_finite_weights")))
    refuse_non_finite(sorted(names), f"weights of {model}")
