"""Draws training rows by the weights in a column of their files (`data.weight_column`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config.data import OTHER_ROWS_FIX
from verl.data.sampler import Sampler
from verl.errors import DataError, explain

if TYPE_CHECKING:
    from verl.config import Config
    from verl.types import Prompt


class WeightedSampler(Sampler):
    """Endless batches of row numbers, drawn by weight; resumable at any batch.

    Each batch is drawn without replacement, one row after the other with probabilities in
    proportion to the weights of the rows that are left. It depends only on seed and number.
    """

    def __init__(self, weights: Sequence[float], batch_size: int, seed: int = 0) -> None:
        """Raises DataError if fewer rows than a batch has can be drawn."""
        usable = sum(weight > 0 for weight in weights)
        if usable < batch_size:
            fix = f"data.train_batch_size={usable}, or raise weights"
            expected = "at least data.train_batch_size"
            got = f"{usable} rows with a weight above 0"
            raise DataError(explain("data.weight_column", got, expected, fix))
        values = np.asarray(weights, np.float64) / max(weights)
        self._shares = values / values.sum()
        self.batch_size, self._seed, self._number = batch_size, seed, 0

    def next_batch(self) -> list[int]:
        """Return the next `batch_size` row numbers, which are all different."""
        generator = np.random.default_rng([self._seed, self._number])
        self._number += 1
        rows = generator.choice(len(self._shares), self.batch_size, replace=False, p=self._shares)
        return [int(row) for row in rows]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next batch."""
        return {"batch": self._number, "num_rows": len(self._shares), "batch_size": self.batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved batch. Raises DataError for other rows or batch size."""
        own = self.state_dict()
        for name in ("num_rows", "batch_size"):
            if state.get(name) != own[name]:
                got, expected = f"{own[name]} {name}", str(state.get(name))
                raise DataError(explain("resumed data order", got, expected, OTHER_ROWS_FIX))
        self._number = state["batch"]


def build(config: Config, prompts: Sequence[Prompt]) -> WeightedSampler:
    """Build the sampler of a run. Raises DataError if it has too few rows with a weight."""
    column = config.data.weight_column
    assert column is not None, "this option asks for it"
    weights = [prompt.extra_info[column] for prompt in prompts]
    return WeightedSampler(weights, config.data.train_batch_size, config.trainer.seed)
