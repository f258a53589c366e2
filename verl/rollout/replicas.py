"""The trainer's side of the rollout replicas: requests and weights go out, answers come in."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from verl.packing import split_groups
from verl.rollout.rollouts import RolloutRequest, Scores, TrainedRollouts
from verl.single_controller.actors import RayWorkerGroup
from verl.types import Sampling, Trajectory
from verl.weights.files import Ranks, Transport

Check = Callable[[], None]
"""Called every few seconds of a wait, which it may end by an error."""


class RolloutReplicas(TrainedRollouts):
    """The replicas of a run, hosted by Ray actors. Every method raises ReplicaLost if one dies.

    Nothing samples while the ranks train or send weights.
    """

    def __init__(
        self, group: RayWorkerGroup, transport: Transport,
        empty_cache: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """`transport`: the way of new weights from the ranks.

        `empty_cache`: frees the ranks' cached device memory before the engines allocate theirs, on
        the same devices, where they sleep while the ranks train; None: engines never sleep.
        """
        self.group, self.transport, self.empty_cache = group, transport, empty_cache
        self.version = 0
        self.scores = Scores()
        self.new_check: Callable[[], Check] = lambda: lambda: None
        """Makes the check of a wait."""
        self.requests: list[RolloutRequest] = []
        """Requests that are started and not finished."""
        self.loads: dict[Any, tuple[int, int]] = {}
        """Replica and version of each pending call that loads weights."""

    @cached_property
    def dtype(self) -> str:
        """The number format in which engines load weights."""
        return str(self.call("dtype")[0])

    def start(
        self, starts: Sequence[Trajectory], sampling: Sampling,
        finished: Mapping[int, Trajectory] | None = None,
    ) -> RolloutRequest:  # fmt: skip
        """Ask the replicas to finish `starts`, except for those `finished` already.

        One replica samples a whole group, if there are enough groups.
        """
        request = RolloutRequest(starts, sampling, dict(finished or {}))
        self.requests.append(request)
        self.submit(request)
        return request

    def submit(self, request: RolloutRequest) -> None:
        """Divide the unfinished trajectories of a request among the replicas.

        All at once: while the ranks train, nobody could give a replica that is done the next group.
        """
        unfinished, request.calls = request.unfinished, {}
        parts = split_groups([request.starts[i].group for i in unfinished], len(self.group))
        for replica, part in enumerate(parts):
            positions = [unfinished[i] for i in part]
            starts = [request.starts[i] for i in positions]
            request.calls[self.sample(replica, starts, request.sampling)] = replica, positions

    def sample(self, replica: int, starts: Sequence[Trajectory], sampling: Sampling) -> Any:
        """Have a replica finish `starts`; returns the call."""
        return self.group.submit(replica, "rollout", starts, sampling)

    def finish(self, request: RolloutRequest) -> list[Trajectory]:
        """Wait until all are finished; return them in order."""
        self.wait_until(lambda: not request.calls)
        self.requests.remove(request)
        return request.in_order()

    def update_weights(self, ranks: Ranks, version: int) -> dict[str, float]:
        """Transfer the policy's current weights to all engines, and wait until they are loaded.

        Returns the seconds of each part: waiting for engines, gathering and writing by the ranks,
        loading by the engines.
        """
        seconds = self.transport.send(ranks, self, version)
        self.version, self.sent = version, self.transport.metrics
        sent = time.perf_counter()
        self.wait_until(lambda: not self.loads)
        return {"wait": 0.0, **seconds, "load": time.perf_counter() - sent}

    @property
    def loading(self) -> list[int]:
        """The versions that replicas are still loading."""
        return sorted({version for _, version in self.loads.values()})

    def pause(self, version: int) -> None:
        """As `Engines.pause`: nothing samples between requests."""
        assert not any(request.calls for request in self.requests), "replicas still sample"

    def load(self, sources: Sequence[str], version: int) -> None:
        """As `Engines.load`; the answers may be scores."""
        for replica, source in enumerate(sources):
            arguments = source, version, self.scores.ids
            self.loads[self.group.submit(replica, "update_weights", *arguments)] = replica, version

    def forget_calls(self) -> None:
        """Forget all pending calls, whose actors are gone; the requests stay."""
        self.loads.clear()
        for request in self.requests:
            request.calls = {}

    def sleep(self) -> None:
        if self.empty_cache is not None:
            self.call("engine.sleep")

    def wake_up(self) -> None:
        if self.empty_cache is not None:
            self.empty_cache()
            self.call("engine.wake_up")

    def shutdown(self) -> None:
        """Stop the engines; kill those that do not answer, and all of them after Ctrl-C."""
        is_stopped = isinstance(sys.exception(), KeyboardInterrupt)
        self.group.shutdown(None if is_stopped else "engine.shutdown")

    def call(
        self, method: str, arguments: Callable[[int], tuple[Any, ...]] = lambda replica: ()
    ) -> list[Any]:
        """Call `method` on every replica i with `arguments(i)`."""
        calls = [self.group.submit(i, method, *arguments(i)) for i in range(len(self.group))]
        return self.group.gather(calls, self.new_check())

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Handle the answers of pending calls until `is_done` returns true."""
        check: Check | None = None
        while not is_done():
            check = check or self.new_check()
            calls = {call: replica for call, (replica, _) in self.loads.items()}
            for request in self.requests:
                calls |= request.replicas
            for call, answer in self.group.poll(calls, check).items():
                if self.loads.pop(call, None) is None:
                    next(r for r in self.requests if call in r.calls).store(call, answer)
                elif answer is not None:
                    self.scores.answers.append(answer)
