"""The trainer's interface to the training ranks: whole batches in, whole results out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from verl.batch import TokenBatch
from verl.errors import SaveError
from verl.packing import Split, join_tokens, split_by_work
from verl.training.devices import PeakMemory
from verl.types import Metrics

if TYPE_CHECKING:
    from verl.single_controller.actors import RayWorkerGroup

FORWARD_COLUMNS = frozenset({"input_ids", "policy_mask", "loss_mask", "value_mask"})
"""Token columns that a forward pass reads; only these are sent to the ranks for it."""


FORWARD = {"actor": "log_probs", "reference": "log_probs", "critic": "values"}
"""The method of each role that computes a number per token."""


class TrainerRanks:
    """The training ranks: a group of actors for each role, which roles may share."""

    def __init__(
        self, groups: Mapping[str, RayWorkerGroup], ranks_per_shard: Mapping[str, int] = {}
    ) -> None:
        """By role: its ranks, and how many of them get the same sequences (by default one)."""
        self._group_of = groups
        self._ranks_per_shard = {role: ranks_per_shard.get(role, 1) for role in groups}
        self.group = groups["actor"]
        self.groups = list(dict.fromkeys(groups.values()))

    def group_of(self, role: str) -> RayWorkerGroup:
        """Return the ranks that hold a role."""
        return self._group_of[role]

    def begin_forward(self, role: str, batch: TokenBatch) -> Callable[[], Tensor]:
        """Start a role's forward pass; returns a function that waits for its result.

        This is (num_tokens,): log-probs of actor and reference, values of the critic; 0 outside the
        role's loss.
        """
        group = self.group_of(role)
        columns = {name: column for name, column in batch.tokens.items() if name in FORWARD_COLUMNS}
        split, shards = self._shard(role, replace(batch, tokens=columns))
        results = group.begin_scatter(f"{role}.{FORWARD[role]}", shards)
        # All ranks of a shard return the same result: use the first's.
        return lambda: join_tokens(results()[:: self._ranks_per_shard[role]], split, batch)

    def update(self, role: str, mini_batch: TokenBatch) -> Metrics:
        """Take one optimizer step of a role; returns its global metrics."""
        shards = self._shard(role, mini_batch)[1]
        return dict(self.group_of(role).begin_scatter(f"{role}.update", shards)()[0])

    def begin_updates(self, role: str, minis: Sequence[TokenBatch]) -> Callable[[], list[Metrics]]:
        """Start several optimizer steps; returns a function that waits for their metrics."""
        # One call per rank: several pending calls might run in a different order on each rank.
        by_rank = zip(*(self._shard(role, mini)[1] for mini in minis), strict=True)
        results = self.group_of(role).begin_scatter(f"{role}.updates", list(by_rank))
        return lambda: list(results()[0])

    def _shard(self, role: str, batch: TokenBatch) -> tuple[Split, list[TokenBatch]]:
        """Split a batch over a role's ranks; returns the split and each rank's shard."""
        size = self._ranks_per_shard[role]
        split = split_by_work(batch, len(self.group_of(role)) // size)
        return split, [shard for shard in split.shards for _ in range(size)]

    def save_policy(self, directory: Path, dtype: str) -> None:
        """Write the policy as a Hugging Face folder."""
        self.group.call("save_policy", str(directory.absolute()), dtype)

    def save_checkpoint(self, directory: Path) -> None:
        """Have every rank write its shards below `directory`. Raises SaveError."""
        raise_first_problem(
            self.groups, self._call_all("save_checkpoint", str(directory.absolute()))
        )

    def start_checkpoint(self, directory: Path) -> None:
        """Have every rank copy its shards to host memory and start writing them."""
        self._call_all("start_checkpoint", str(directory.absolute()))

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint of `start_checkpoint` is written. Raises SaveError."""
        raise_first_problem(self.groups, self._call_all("finish_checkpoint"))

    def can_copy_checkpoint(self) -> bool:
        """Whether each host has enough memory for a copy of the shards of its ranks."""
        ranks = list(itertools.chain(*self._call_all("checkpoint_memory")))
        needed = Counter[str]()
        for host, num_bytes, _ in ranks:
            needed[host] += num_bytes
        return all(needed[host] < 0.8 * available for host, _, available in ranks)

    def _call_all(self, method: str, *args: Any) -> list[list[Any]]:
        """Make the same call on every rank concurrently; returns the results of each group."""
        pending = [group.begin(method, *args) for group in self.groups]
        return [results() for results in pending]

    def load_checkpoint(self, directory: Path) -> None:
        """Have every rank read its shards from `directory`."""
        self._call_all("load_checkpoint", str(directory.absolute()))

    def take_peak_memory(self, role: str = "actor") -> PeakMemory | None:
        """Return the peak device memory of any of a role's ranks since the last call."""
        return max_peak(self.group_of(role).call("take_peak_memory"))

    def shutdown(self) -> None:
        """Shut the ranks down."""
        for group in self.groups:
            group.shutdown()


def raise_first_problem(groups: Sequence[RayWorkerGroup], problems: Sequence[list[str]]) -> None:
    """Raise SaveError with the first rank's problem that is not empty."""
    for group, group_problems in zip(groups, problems, strict=True):
        for rank, problem in enumerate(group_problems):
            if problem.startswith("rank "):  # torch's checkpoint errors name the rank
                raise SaveError(problem)
            if problem:
                raise SaveError(f"{group.name} {rank}: {problem}")


def max_peak(peaks: Sequence[PeakMemory | None]) -> PeakMemory | None:
    """Return the maximum of each figure; None if there are no peaks."""
    known = [peak for peak in peaks if peak is not None]
    if not known:
        return None
    return PeakMemory(max(p.allocated for p in known), max(p.reserved for p in known))
