"""The rollout replicas as the trainer sees them: one that dies or hangs is replaced on the way.

A replica holds nothing that cannot be made again: its weights lie in the folder they were handed
over in, and each trajectory follows from its prompt and its seed. So whatever a lost replica was
asked is asked of its successor, and nobody above notices but for a line and a count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayTaskError

from verl.errors import ReplicaLost
from verl.rollout.replica import EngineDied
from verl.single_controller.actors import RayWorkerGroup
from verl.single_controller.deaths import DEATHS, cause_of
from verl.single_controller.dispatch import split_groups
from verl.single_controller.restarts import Restarts
from verl.training.node_folder import new_path, on_node
from verl.types import Sampling, Trajectory

POLL_S = 5.0
"""Longest wait between two looks at replicas that are busy."""


class Weights(Protocol):
    """Those that hold the policy, the training ranks; each node's write to its own `on_node`."""

    def hand_over_weights(self, directory: Path, dtype: str) -> float:
        """Returns the seconds in which files were written."""
        ...

    def hand_over_adapter(self, directory: Path) -> float:
        """Returns the seconds in which files were written."""
        ...


@dataclass
class Asked:
    """A call under way on one replica, and when that was last heard of."""

    index: int
    probe: Any
    heard: float = field(default_factory=time.monotonic)


class RolloutReplicas:
    """Engines that turn started trajectories into finished ones."""

    def __init__(
        self,
        group: RayWorkerGroup,
        factory: Callable[..., Any],
        arguments: Sequence[Sequence[Any]],
        restarts: Restarts,
        takes_adapter: bool = False,
        hang_timeout: float | None = None,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`factory(*arguments[i])` makes what actor i hosts, now and when it is replaced.

        `make_room` has others give device memory back before engines take their own, awake or
        new; `hang_timeout` is in seconds.
        """
        self.group = group
        self.takes_adapter = takes_adapter
        self.version = 0
        self.restarts = restarts
        self._factory, self._arguments = factory, list(arguments)
        self._make_room = make_room
        self._hang_timeout = math.inf if hang_timeout is None else hang_timeout
        self._weights = new_path()
        self.dtype = str(self._ask("dtype")[0])

    def generate(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        """Finish `starts`, in their order; those of one group at one replica.

        A replaced replica begins its part of them anew, with the same seeds; what the others have
        is kept.
        """
        parts = split_groups([start.group for start in starts], len(self.group))
        shards = [[starts[i] for i in part] for part in parts]
        answers = self._ask("rollout", [(shard, sampling) for shard in shards])
        finished: dict[int, Trajectory] = {}
        for part, answer in zip(parts, answers, strict=True):
            finished.update(zip(part, answer, strict=True))
        return [finished[i] for i in range(len(starts))]

    def update_weights(self, ranks: Weights) -> dict[str, float]:
        """Bring the actor's present weights into every engine; old cached prefixes are dropped.

        Where engines take the policy's adapter, that alone travels. Returns the seconds of each
        part: ranks gather and write, engines load.
        """
        start = time.perf_counter()
        if self.takes_adapter:
            write = ranks.hand_over_adapter(self._weights)
        else:
            write = ranks.hand_over_weights(self._weights, self.dtype)
        written = time.perf_counter()
        self.version += 1
        self._ask("take", [self._present(i) for i in range(len(self.group))])
        loaded = time.perf_counter()
        return {"gather": written - start - write, "write": write, "load": loaded - written}

    def sleep(self) -> None:
        """Give the devices' memory to the training ranks."""
        self._ask("sleep")

    def wake_up(self) -> None:
        """Take the memory back, before weights are updated or tokens generated.

        Once a step, others first give back what they kept for reuse: engines wake up into what is
        free.
        """
        self._make_room()
        self._ask("wake_up")

    def shutdown(self) -> None:
        """Stop the engines, by force those that do not answer."""
        self.group.last_call("shutdown")
        self.group.shutdown()

    def _present(self, index: int) -> tuple[str, int, bool]:
        """Where the present weights lie for a replica, their version, and whether an adapter."""
        node_id = self.group.places()[index].node_id
        return str(on_node(self._weights, node_id)), self.version, self.takes_adapter

    def _ask(self, method: str, arguments: Sequence[Sequence[Any]] | None = None) -> list[Any]:
        """Call `method` on every replica, replacing those that are lost, until each has answered.

        Raises ReplicaLost when one cannot be replaced.
        """
        arguments = arguments or [()] * len(self.group)
        answers: dict[int, Any] = {}
        asked = dict(self._submit(i, method, arguments[i]) for i in range(len(self.group)))
        while asked:
            done, _ = ray.wait(list(asked), timeout=min(POLL_S, self._hang_timeout / 4))
            for call in done:
                index = asked.pop(call).index
                try:
                    answers[index] = ray.get(call)
                except (*DEATHS, EngineDied) as error:
                    asked |= self._ask_successor(index, cause_of(error), method, arguments[index])
            for call, cause in self._silent(asked):
                index = asked.pop(call).index
                asked |= self._ask_successor(index, cause, method, arguments[index])
        return [answers[i] for i in range(len(self.group))]

    def _submit(self, index: int, method: str, arguments: Sequence[Any]) -> tuple[Any, Asked]:
        call = self.group.submit(index, method, *arguments)
        return call, Asked(index, self.group.submit(index, "probe"))

    def _silent(self, asked: dict[Any, Asked]) -> list[tuple[Any, str]]:
        """The calls whose replica is lost, as its probe tells, and why; probes the others again."""
        now, found = time.monotonic(), []
        for call, one in asked.items():
            if not ray.wait([one.probe], timeout=0)[0]:
                if now - one.heard > self._hang_timeout:
                    found.append((call, f"no sign of life for {self._hang_timeout:.0f} s"))
                continue
            try:
                ray.get(one.probe)
            except (*DEATHS, EngineDied) as error:
                found.append((call, cause_of(error)))
                continue
            one.heard, one.probe = now, self.group.submit(one.index, "probe")
        return found

    def _ask_successor(
        self, index: int, cause: str, method: str, arguments: Sequence[Any]
    ) -> dict[Any, Asked]:
        """Replace a lost replica and ask the new one the same."""
        lost = self.group.lost(index, cause)
        while True:
            self.restarts.spend_on_replica(lost)
            self._make_room()
            self.group.replace(index)
            try:
                self._prepare(index, takes_weights=method != "take")
                return dict([self._submit(index, method, arguments)])
            except (*DEATHS, EngineDied) as error:
                lost = self.group.lost(index, cause_of(error))
            except RayTaskError as error:
                raise ReplicaLost(
                    f"{self.group.describe(index)} does not start again: {cause_of(error)}"
                ) from error

    def _prepare(self, index: int, takes_weights: bool) -> None:
        """Build and start one replica, and give it the present weights, if there were any yet."""
        self.group.start_one(index, self._factory, self._arguments[index])
        calls: list[tuple[str, Sequence[Any]]] = [("start", ())]
        if takes_weights and self.version:
            calls.append(("take", self._present(index)))
        for method, arguments in calls:
            ray.get(self.group.submit(index, method, *arguments))
