"""The order of training prompts: shuffled by seed and epoch, resumable at any batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from verl.errors import ConfigError, explain


class PromptSampler:
    """Batches of row numbers without end, in an order that depends on seed and epoch only.

    Rows are never dropped: a last, partial batch is completed from the next epoch's permutation.
    So that no batch holds a row twice, rows of that partial batch come later in the next epoch.
    With `shuffle` false every epoch is in file order.
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
        """`batch_size` different row numbers."""
        batch = self._order[self._position : self._position + self.batch_size]
        self._position += len(batch)
        if self._position == self.num_rows:
            self._epoch += 1
            self._position = self.batch_size - len(batch)
            self._order = self._epoch_order(self._epoch, batch if self._position else [])
            batch = batch + self._order[: self._position]
        return batch

    def state_dict(self) -> dict[str, int]:
        """Where the next batch starts."""
        return {"epoch": self._epoch, "position": self._position, "num_rows": self.num_rows,
                "batch_size": self.batch_size}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where a sampler of the same rows and batch size stood. Raises ConfigError."""
        for name in ("num_rows", "batch_size"):
            if state[name] != getattr(self, name):
                fix = "resume with the data and data.train_batch_size of the checkpoint"
                got = f"{getattr(self, name)} {name}"
                raise ConfigError(explain("resumed data order", got, str(state[name]), fix))
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = []
        for number in range(self._epoch + 1):  # each depends on the tail of the one before
            tail_length = self.num_rows * number % self.batch_size
            tail = self._order[self.num_rows - tail_length :] if number else []
            self._order = self._epoch_order(number, tail)

    def _epoch_order(self, epoch: int, tail: Sequence[int]) -> list[int]:
        """The epoch's permutation; rows of `tail` are swapped out of the batch they began."""
        if not self._shuffle:
            return list(range(self.num_rows))
        generator = np.random.default_rng([self._seed, epoch])
        order: list[int] = generator.permutation(self.num_rows).tolist()
        held = set(tail)
        head = self.batch_size - len(held) if held else 0
        free = (i for i in range(head, self.num_rows) if order[i] not in held)
        for i in range(head):
            if order[i] in held:
                j = next(free)
                order[i], order[j] = order[j], order[i]
        return order


def num_batches(num_rows: int, batch_size: int, num_epochs: int) -> int:
    """Batches of a `PromptSampler` until each row was seen `num_epochs` times or more."""
    return -(-num_rows * num_epochs // batch_size)
