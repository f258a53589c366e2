"""`data.shuffle_train_dataloader=by_score`: rows are drawn by how their last groups scored.

A group whose scores are equal, or in which the outcome gate finds nobody right, teaches nothing.
Half of a batch are rows whose last group taught something; the rest follow shuffled epochs, in
which a row sits out after groups that taught nothing: 1 epoch, then 3, then 7 as long as they do.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.sampler import PromptSampler, Sampler
from verl.trainer.collect import Samples, live_groups
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.config import Config
    from verl.rewards.interface import Reward
    from verl.types import Prompt, Trajectory

LONGEST_REST = 7
"""Epochs that a row sits out at most."""


@dataclass
class Memory:
    """What is known of a row since its last group."""

    spread: float
    """Standard deviation of its scores; 0 if it taught nothing."""
    num_dead: int = 0
    """Groups in a row that taught nothing."""
    rest: int = 0
    """Epochs that the row still sits out."""


class ScoreSampler(Sampler):
    """Endless batches of row numbers; what is drawn depends on the seed and the past scores only.

    A row that was drawn waits until its group is scored, or a batch drawn later is: so nothing is
    drawn twice while batches are sampled ahead of time.
    """

    def __init__(self, config: Config, prompts: Sequence[Prompt]) -> None:
        """Raises ConfigError if a batch has more rows than there are."""
        self._config, self._seed = config, config.trainer.seed
        self._rows = {prompt.uid: row for row, prompt in enumerate(prompts)}
        self.num_rows, self.batch_size = len(prompts), config.data.train_batch_size
        PromptSampler(self.num_rows, self.batch_size)  # the same conditions
        self._number = self._epoch = self._position = 0
        self._memory: dict[int, Memory] = {}
        self._waiting: dict[int, int] = {}
        """Number of the batch in which each row waits for its scores."""

    def next_batch(self) -> list[int]:
        """Return the next `batch_size` row numbers, which are all different."""
        batch = self._draw_live(self.batch_size // 2)
        visits = self._visits()
        for patience in count():
            if len(batch) == self.batch_size:
                break
            row = next(visits)
            if row in batch:
                continue
            # After an epoch without enough rows those that sit out are drawn, then those that wait.
            is_free = row not in self._waiting and patience > self.num_rows
            if self._is_due(row) or is_free or patience > 3 * self.num_rows:
                batch.append(row)
        self._waiting |= dict.fromkeys(batch, self._number)
        self._number += 1
        return batch

    def _draw_live(self, size: int) -> list[int]:
        """Draw up to `size` rows whose last group taught something, by the spread of its scores."""
        known = sorted(self._memory.items())
        live = [(row, m.spread) for row, m in known if m.spread > 0 and row not in self._waiting]
        if not live:
            return []
        rows, spreads = zip(*live, strict=True)
        generator = np.random.default_rng([self._seed, self._number, 1])
        shares = np.asarray(spreads) / sum(spreads)
        chosen = generator.choice(len(rows), min(size, len(rows)), replace=False, p=shares)
        return [rows[i] for i in chosen]

    def _visits(self) -> Iterator[int]:
        """Yield rows in the order of shuffled epochs, from the current position on."""
        while True:
            order = np.random.default_rng([self._seed, self._epoch]).permutation(self.num_rows)
            while self._position < self.num_rows:
                self._position += 1
                yield int(order[self._position - 1])
            self._epoch, self._position = self._epoch + 1, 0

    def _is_due(self, row: int) -> bool:
        """Whether a row that is visited may be drawn; counts the epochs that it sits out."""
        memory = self._memory.get(row)
        if row in self._waiting:
            return False
        if memory is not None and memory.rest > 0:
            memory.rest -= 1
            return False
        return True

    def observe(self, trajectories: Sequence[Trajectory], rewards: Sequence[Reward]) -> Metrics:
        """Remember scored groups; return the shares of rows that taught something or did not."""
        samples = Samples(list(trajectories), list(rewards))
        live, scores = set(live_groups(samples, self._config)), dict[str, list[float]]()
        row_of = {t.group: self._rows[t.prompt.uid] for t in trajectories}
        for trajectory, reward in zip(trajectories, rewards, strict=True):
            scores.setdefault(trajectory.group, []).append(reward.score)
        for group, row in row_of.items():
            if group in live:
                self._memory[row] = Memory(statistics.pstdev(scores[group]))
                continue
            num_dead = self._memory.get(row, Memory(0.0)).num_dead + 1
            rest = LONGEST_REST if num_dead > 2 else 2**num_dead - 1
            self._memory[row] = Memory(0.0, num_dead, rest)
        # Batches are scored in their order: rows of earlier ones were lost with a failure. Of the
        # last one some may be sampled with a later step.
        scored = set(row_of.values())
        last = max((self._waiting.get(row, -1) for row in scored), default=-1)
        waiting = self._waiting.items()
        self._waiting = {row: n for row, n in waiting if n >= last and row not in scored}
        num_live = sum(memory.spread > 0 for memory in self._memory.values())
        num_dead = len(self._memory) - num_live
        return {"rollout/rows_live": num_live / self.num_rows,
                "rollout/rows_dead": num_dead / self.num_rows}  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return position and memory."""
        memory = [[row, *astuple(known)] for row, known in sorted(self._memory.items())]
        return {"epoch": self._epoch, "position": self._position, "num_rows": self.num_rows,
                "batch_size": self.batch_size, "batch": self._number, "memory": memory,
                "waiting": sorted(self._waiting.items())}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position; that of shuffled epochs has no memory.

        Raises ConfigError for other rows or batch size.
        """
        PromptSampler(self.num_rows, self.batch_size).load_state_dict(state)
        self._epoch, self._position = state["epoch"], state["position"]
        self._number = state.get("batch", 0)
        self._memory = {row: Memory(*known) for row, *known in state.get("memory", [])}
        self._waiting = dict(state.get("waiting", []))
