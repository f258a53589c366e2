"""The order of the training data: batches of row numbers, resumable at any position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config.data import BY_SCORE, OTHER_ROWS_FIX
from verl.errors import ConfigError, explain

if TYPE_CHECKING:
    from verl.config import Config
    from verl.rewards.interface import Reward
    from verl.types import Metrics, Trajectory

SAMPLERS = {
    "weighted": "verl.ext.weighted:build",
    BY_SCORE: "verl.ext.score_memory:ScoreSampler",
}
"""What is called with the options of a run and its prompts, by name."""


class Sampler(ABC):
    """What chooses the rows of each batch."""

    @abstractmethod
    def next_batch(self) -> list[int]:
        """Return the row numbers of the next batch, which are all different."""

    def observe(self, trajectories: Sequence[Trajectory], rewards: Sequence[Reward]) -> Metrics:
        """Learn from a step's scored groups; returns metrics of what it knows."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, and among how many rows (`num_rows`)."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position. Raises UserError for other rows or batch size."""


class PromptSampler(Sampler):
    """Endless batches of row numbers, in an order that depends only on seed and epoch.

    No row is dropped: the partial batch at the end of an epoch is completed with rows of the next
    one. Rows that are already in that batch come later in the next epoch, so that no batch contains
    a row twice. Without `shuffle`, every epoch is in file order.
    """

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool = True, seed: int = 0) -> None:
        if batch_size > num_rows:
            expected = f"at most the {num_rows} rows there are"
            fix = f"data.train_batch_size={num_rows}, or give more rows"
            raise ConfigError(explain("data.train_batch_size", batch_size, expected, fix))
        self.num_rows, self.batch_size = num_rows, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._epoch = self._position = 0
        self._order = self._epoch_order(0, [])

    def next_batch(self) -> list[int]:
        """Return the next `batch_size` row numbers, which are all different."""
        batch = self._order[self._position : self._position + self.batch_size]
        self._position += len(batch)
        if self._position == self.num_rows:
            self._epoch += 1
            self._position = self.batch_size - len(batch)
            self._order = self._epoch_order(self._epoch, batch if self._position else [])
            batch = batch + self._order[: self._position]
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch."""
        return {"epoch": self._epoch, "position": self._position, "num_rows": self.num_rows,
                "batch_size": self.batch_size}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position. Raises ConfigError for other rows or batch size."""
        for name in ("num_rows", "batch_size"):
            if state[name] != getattr(self, name):
                got, expected = f"{getattr(self, name)} {name}", str(state[name])
                raise ConfigError(explain("resumed data order", got, expected, OTHER_ROWS_FIX))
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = []
        for number in range(self._epoch + 1):  # each order depends on the tail of the previous one
            tail_length = self.num_rows * number % self.batch_size
            tail = self._order[self.num_rows - tail_length :] if number else []
            self._order = self._epoch_order(number, tail)

    def _epoch_order(self, epoch: int, tail: Sequence[int]) -> list[int]:
        """Return the row order of an epoch, which begins by completing the batch with `tail`.

        `tail` are the rows of the partial batch that the previous epoch left. Those that would
        complete it are swapped with later rows.
        """
        if not self._shuffle:
            return list(range(self.num_rows))
        generator = np.random.default_rng([self._seed, epoch])
        order: list[int] = generator.permutation(self.num_rows).tolist()
        taken = set(tail)
        num_completing = self.batch_size - len(taken) if taken else 0
        free = (i for i in range(num_completing, self.num_rows) if order[i] not in taken)
        for i in range(num_completing):
            if order[i] in taken:
                j = next(free)
                order[i], order[j] = order[j], order[i]
        return order


def starts_over(config: Config, state: Mapping[str, Any], num_rows: int) -> bool:
    """Whether a saved position is among another number of rows, and the user accepted other data.

    Then it means nothing here: the order begins anew, without the rows that were drawn before.
    """
    return config.accepts_other_rows and state.get("num_rows", num_rows) != num_rows


def num_batches(num_rows: int, batch_size: int, num_epochs: int) -> int:
    """Return after how many batches a `PromptSampler` has returned each row `num_epochs` times."""
    return -(-num_rows * num_epochs // batch_size)
