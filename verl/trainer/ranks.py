"""A run's training ranks as the trainer sees them: whole batches in, whole answers out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.errors import ConfigError, SaveError, explain
from verl.monitor.flops import peak_flops
from verl.packing import Split, join_tokens, split_by_work
from verl.rollout.interface import WEIGHT_SYNC
from verl.single_controller.actors import Call, RayWorkerGroup
from verl.training.devices import PeakMemory
from verl.training.node_folder import on_node
from verl.training.weight_broadcast import SCHEME
from verl.training.weight_stream import TransferStats
from verl.types import Metrics, TokenBatch

FORWARD_COLUMNS = frozenset({"input_ids", "policy_mask", "loss_mask", "value_mask"})
"""Token columns that a forward reads, where a batch has them: no others are sent for it."""


@dataclass(frozen=True)
class BatchSharding:
    """How batches are divided over ranks."""

    pair_cost: float = 0.0
    """By which work is balanced (`ModelFlops.pair_cost`)."""
    sp_size: int = 1
    """Ranks of a sequence-parallel group, which get the same sequences."""

    def shard(self, batch: TokenBatch, num_ranks: int) -> tuple[Split, list[TokenBatch]]:
        """Divide a batch over sequence-parallel groups; also return the shard of each rank."""
        split = split_by_work(batch, num_ranks // self.sp_size, self.pair_cost)
        return split, [shard for shard in split.shards for _ in range(self.sp_size)]


class TrainerRanks:
    """FSDP ranks that hold actor, reference and critic, which may have ranks of its own."""

    def __init__(
        self,
        group: RayWorkerGroup,
        own_critic: RayWorkerGroup | None = None,
        *,
        policy: BatchSharding = BatchSharding(),
        critic: BatchSharding = BatchSharding(),
    ) -> None:
        """How the batches of policy and critic are divided."""
        self._policy, self._critic = policy, critic
        self.group, self.has_own_critic = group, own_critic is not None
        self.critic_group = group if own_critic is None else own_critic
        self.groups = [group] if own_critic is None else [group, own_critic]
        self._sent: Metrics = {}

    def log_probs(self, batch: TokenBatch) -> Tensor:
        """The actor's log-probs, (num_tokens,), 0 outside the loss mask."""
        return begin_per_token(self.group, "actor.log_probs", batch, self._policy)()

    def ref_log_probs(self, batch: TokenBatch) -> Tensor:
        """The reference's log-probs, (num_tokens,), 0 outside the loss mask."""
        return begin_per_token(self.group, "reference.log_probs", batch, self._policy)()

    def begin_values(self, batch: TokenBatch) -> Callable[[], Tensor]:
        """Begin the critic's values, (num_tokens,), 0 outside the loss mask; the answer waits."""
        return begin_per_token(self.critic_group, "critic.values", batch, self._critic)

    def update_actor(self, mini_batch: TokenBatch) -> Metrics:
        """One optimizer step of the policy; metrics are global, the same on every rank."""
        shards = self._policy.shard(mini_batch, len(self.group))[1]
        return dict(self.group.begin_scatter("actor.update", shards)()[0])

    def begin_update_critic(self, minis: Sequence[TokenBatch]) -> Callable[[], list[Metrics]]:
        """Begin the critic's optimizer steps on all of these, in their order; the answer waits.

        One call for all: several might begin in another order, on each rank in its own.
        """
        shards = [self._critic.shard(mini, len(self.critic_group))[1] for mini in minis]
        by_rank = list(zip(*shards, strict=True))
        answers = self.critic_group.begin_scatter("critic.updates", by_rank)
        return lambda: list(answers()[0])

    def take_calls(self) -> dict[str, list[Call]]:
        """What each rank did since the last time, by the rank's name."""
        return {
            f"{group.name} {number}": calls
            for group in self.groups
            for number, calls in enumerate(group.take_calls())
        }

    def save_policy(
        self, directory: Path, dtype: str = "bfloat16", is_adapter: bool = False
    ) -> None:
        """Write the policy once, as a Hugging Face folder, or its adapter as peft's folder."""
        self.group.call("save_policy", str(directory.absolute()), dtype, is_adapter)

    def share_policy(
        self, directory: Path, version: int, needed: Sequence[int], dtype: str, is_adapter: bool
    ) -> float:
        """Write the policy, or its adapter, on each node for its engines (`replicas.Policy`).

        Returns the seconds of writing files, of the node that took longest.
        """
        folders = [str(on_node(directory, location.node_id)) for location in self.group.locations()]
        given = (version, needed, dtype, is_adapter)
        seconds: list[float] = self.group.scatter("share_policy", folders, *given)
        return max(seconds)

    def open_broadcast(self, num_receivers: int) -> str:
        """Let engines' workers join the first rank; returns the name of the stream."""
        given = "open_broadcast", self.group.locations()[0].host, num_receivers
        return str(self.group.gather([self.group.submit(0, *given)])[0])

    def send_policy(self, stream: str, cards: Sequence[str], dtype: str) -> float:
        """Send the policy to engines' workers on these cards: from the first rank to all that have
        joined it, or from the first rank on each card.

        Returns the packing seconds of the slowest rank; see also `take_transfer_metrics`. Raises
        ConfigError for a card without a rank.
        """
        counts = [0] * len(self.group) if stream.startswith(SCHEME) else self._per_rank(cards)
        sent: list[TransferStats] = self.group.scatter("send_policy", counts, stream, dtype)
        self._sent = {"perf/weights_sent_bytes": float(sum(one.num_bytes for one in sent))}
        if num_elements := sum(one.num_elements for one in sent):
            num_changed = sum(one.num_changed for one in sent)
            self._sent["perf/weights_changed_share"] = num_changed / num_elements
        return max(one.seconds for one in sent)

    def take_transfer_metrics(self) -> Metrics:
        """Bytes and changed share of the last `send_policy`, once."""
        sent, self._sent = self._sent, {}
        return sent

    def _per_rank(self, cards: Sequence[str]) -> list[int]:
        """How many of the workers on these cards each rank sends to."""
        left = Counter(cards)
        counts = [left.pop(card, 0) for card in self.group.call("device_key")]
        if left:
            got = f"an engine on {', '.join(left)}, where no rank is"
            fix = "actor_rollout_ref.rollout.weight_sync=files"
            raise ConfigError(explain(WEIGHT_SYNC, got, "a rank on each engine's device", fix))
        return counts

    def save_checkpoint(self, directory: Path) -> None:
        """Every rank writes its shards below `directory`. Raises SaveError."""
        self._raise_first(self._on_all("save_checkpoint", str(directory.absolute())))

    def start_checkpoint(self, directory: Path) -> None:
        """Every rank copies its shards to host memory and begins to write them."""
        self._on_all("start_checkpoint", str(directory.absolute()))

    def finish_checkpoint(self) -> None:
        """Wait until what `start_checkpoint` began is written. Raises SaveError."""
        self._raise_first(self._on_all("finish_checkpoint"))

    def checkpoint_bytes(self) -> int:
        """Bytes of all ranks' shards."""
        return sum(num_bytes for _, num_bytes, _ in itertools.chain(*self._room()))

    def can_copy_checkpoint(self) -> bool:
        """Whether each host has the memory for a copy of the shards of its ranks."""
        room, needed = list(itertools.chain(*self._room())), Counter[str]()
        for host, num_bytes, _ in room:
            needed[host] += num_bytes
        return all(needed[host] < 0.8 * available for host, _, available in room)

    def _room(self) -> list[list[Any]]:
        return self._on_all("checkpoint_memory")

    def _on_all(self, method: str, *args: Any) -> list[list[Any]]:
        """The same call on every rank at once; the answers of each group."""
        return [answers() for answers in [group.begin(method, *args) for group in self.groups]]

    def _raise_first(self, problems: Sequence[Sequence[str]]) -> None:
        for group, found in zip(self.groups, problems, strict=True):
            raise_first_problem(found, group.name)

    def load_checkpoint(self, directory: Path) -> None:
        """Every rank reads its shards from `directory`."""
        self._on_all("load_checkpoint", str(directory.absolute()))

    def scale_lr(self, scale: float) -> None:
        """Actor and critic learn at `scale` times their configured rates from now on."""
        self._on_all("scale_lr", scale)

    def empty_cache(self) -> None:
        """Give back the memory that torch keeps for reuse of the devices that engines may share."""
        self.group.call("empty_cache")

    def take_peak_memory(self) -> PeakMemory | None:
        """The most that any rank held of its device since the last call; None on CPU."""
        return max_peak(self.group.call("take_peak_memory"))

    def take_critic_peak_memory(self) -> PeakMemory | None:
        """The same of a critic's own ranks."""
        return max_peak(self.critic_group.call("take_peak_memory"))

    def peak_flops(self) -> float | None:
        """FLOP/s of a rank's card at most; None where that is not known, as on CPU."""
        return peak_flops(*self.group.call("card_and_dtype")[0])

    def shutdown(self) -> None:
        """End the ranks."""
        for group in self.groups:
            group.shutdown()


def begin_per_token(
    group: RayWorkerGroup, method: str, batch: TokenBatch, sharding: BatchSharding
) -> Callable[[], Tensor]:
    """Divide a batch over a group's ranks; the answer waits for a value for each token."""
    seen = {name: column for name, column in batch.tokens.items() if name in FORWARD_COLUMNS}
    split, shards = sharding.shard(replace(batch, tokens=seen), len(group))
    answers = group.begin_scatter(method, shards)
    return lambda: join_tokens(answers()[:: sharding.sp_size], split, batch)


def max_peak(found: Sequence[PeakMemory | None]) -> PeakMemory | None:
    """The larger of each figure; None where there is none."""
    peaks = [peak for peak in found if peak is not None]
    if not peaks:
        return None
    return PeakMemory(max(p.allocated for p in peaks), max(p.reserved for p in peaks))


def raise_first_problem(problems: Sequence[str], name: str = "rank") -> None:
    """Raise SaveError with the first rank's problem, if any rank had one."""
    for rank, problem in enumerate(problems):
        if problem:
            raise SaveError(problem if problem.startswith("rank ") else f"{name} {rank}: {problem}")
