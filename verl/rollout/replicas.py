"""The rollout replicas as the trainer sees them; when one is lost, all are started again.

A replica holds nothing that cannot be made again: its weights lie in a folder that the ranks wrote,
and each trajectory follows from its prompt and its seed. So after a loss the engines start anew,
take the present weights, and are asked again for what they had not finished.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ray.exceptions import RayError, RayTaskError

from verl.errors import ReplicaLost, UserError
from verl.packing import scheduling_units, split_groups
from verl.rollout.pool import Claims, RolloutPool, RolloutRequest
from verl.rollout.replica import RolloutReplica
from verl.single_controller.actors import RayWorkerGroup, Restarts, cause_of
from verl.training.node_folder import new_path, on_node
from verl.types import Sampling, Trajectory, TrajectoryKey

PATIENCE_S = 30.0
"""Within which a replica says what it has finished."""


class Policy(Protocol):
    """Those that hold the policy, the training ranks."""

    def share_policy(
        self, directory: Path, version: int, needed: Sequence[int], dtype: str, is_adapter: bool
    ) -> float:
        """Write it into `on_node(directory)/version` of each node; returns the seconds of writing.

        Of the versions that lie there, those that are not `needed` go before.
        """
        ...

    def open_broadcast(self, num_receivers: int) -> str:
        """Let so many workers of engines on other devices join; returns the name of the stream."""
        ...

    def send_policy(self, stream: str, cards: Sequence[str], dtype: str) -> float:
        """Send it to engines' workers on these cards; returns the seconds of sending."""
        ...


class RolloutReplicas(RolloutPool):
    """Engines that turn started trajectories into finished ones."""

    def __init__(
        self,
        group: RayWorkerGroup,
        arguments: Sequence[Sequence[Any]],
        restarts: Restarts,
        takes_adapter: bool = False,
        shares_devices: bool = True,
        overlaps: bool = False,
        hang_timeout: float | None = None,
        empty_cache: Callable[[], None] = lambda: None,
        weight_sync: str = "files",
        weights_root: Path | None = None,
        is_divided: bool = False,
    ) -> None:
        """Actor i hosts `RolloutReplica(*arguments[i])`, now and after a loss.

        Where they do not share the ranks' devices, engines never sleep. Where it `overlaps`, they
        sample while the ranks train: they do not sleep either, and nobody waits until they have
        taken new weights. `empty_cache` has the ranks give back device memory that they keep for
        reuse, before engines take theirs; `hang_timeout` is in seconds. Ranks send weights to
        engines by `weight_sync`; as files they are handed over in `weights_root`, or in each node's
        memory. A batch `is_divided` beforehand where replicas are not to claim what they have
        room for, but repeat a schedule.
        """
        self.group = group
        self.takes_adapter = takes_adapter
        self.version, self._is_published = 0, False
        self._is_divided, self._num_requests = is_divided, 0
        self.restarts = restarts
        self.overlaps, self._sleeps = overlaps, shares_devices and not overlaps
        self._arguments = list(arguments)
        self._empty_cache, self._weight_sync = empty_cache, weight_sync
        self._policy: Policy | None = None
        """Who sends weights again to engines that are started again."""
        self._broadcast: str | None = None
        """The stream that the present engines have joined."""
        self._hang_timeout = math.inf if hang_timeout is None else hang_timeout
        self._weights = new_path(weights_root)
        self._requests: list[RolloutRequest] = []
        self._num_calls: Counter[int] = Counter()
        """For trajectories, of each replica since it was started."""
        self._weight_updates: dict[Any, tuple[int, int]] = {}
        """Replica and version of each call that brings weights and is not answered yet."""
        self.dtype = str(self._call_all("dtype")[0])

    def start(
        self, starts: Sequence[Trajectory], sampling: Sampling,
        finished: Mapping[int, Trajectory] | None = None,
    ) -> RolloutRequest:  # fmt: skip
        """Ask for `starts`, those of one group of one replica, by the present weights or later; for
        those that are not `finished`."""
        request = RolloutRequest(starts, sampling, dict(finished or {}))
        self._requests.append(request)
        self._submit(request)
        return request

    def finish(self, request: RolloutRequest) -> list[Trajectory]:
        """Wait until all are finished, in their order. Raises ReplicaLost as `_call_all` does."""
        self._handle_answers_until(lambda: not request.calls)
        self._requests.remove(request)
        return request.in_order()

    def fetch_finished(self) -> Callable[[], Mapping[TrajectoryKey, Trajectory]]:
        """Take what is answered by now, and ask for what is finished in calls that are not, which
        wait for the slowest. A replica that is lost, or silent, has nothing: whoever waits for it
        is told."""
        for call, replica in [c for request in self._requests for c in request.calls.items()]:
            if self.group.is_done(call):
                with contextlib.suppress(UserError, RayError):
                    self._store_finished(call, self.group.poll({call: replica})[call])
        asked = {self.group.submit(i, "finished"): i for i in range(len(self.group))}
        end = time.monotonic() + PATIENCE_S

        def wait() -> dict[TrajectoryKey, Trajectory]:
            found: dict[TrajectoryKey, Trajectory] = {}
            with contextlib.suppress(UserError, RayError):
                while asked and time.monotonic() < end:
                    for call, answer in self.group.poll(asked).items():
                        found |= answer
                        del asked[call]
            return found

        return wait

    def abandon(self, request: RolloutRequest) -> None:
        """Stop what is still sampled of it."""
        self._requests.remove(request)
        self.group.cancel(list(request.calls))

    def update_weights(self, policy: Policy) -> dict[str, float]:
        """Bring the present policy into every engine; where engines take adapters, that alone.

        A replica takes it as soon as what it samples is whole; until every one has taken the
        version before, the next is not written. Returns the seconds of each part: ranks gather and
        write, engines load.
        """
        start = time.perf_counter()
        self._wait_for_weight_updates(max_pending=1)
        if self._weight_sync != "files":
            return self._stream_weights(policy)
        waited, version = time.perf_counter(), self.version + 1
        needed = sorted({version for _, version in self._weight_updates.values()})
        write = policy.share_policy(self._weights, version, needed, self.dtype, self.takes_adapter)
        written, self.version, self._is_published = time.perf_counter(), version, True
        self._start_weight_updates()
        if not self.overlaps:
            self._wait_for_weight_updates(max_pending=0)
        loaded = time.perf_counter()
        return {"wait": waited - start, "gather": written - waited - write, "write": write,
                "load": loaded - written}  # fmt: skip

    def _stream_weights(self, policy: Policy) -> dict[str, float]:
        """Have ranks send the present policy while engines load it; the seconds of each part."""
        start, cards = time.perf_counter(), self._call_all("engine.cards")
        self.version, self._is_published, self._policy = self.version + 1, True, policy
        self._call_all("pause", self._version_and_num_calls)
        paused = time.perf_counter()
        calls, packed = self._send_weights(policy, cards)
        self._weight_updates |= {
            call: (replica, self.version) for replica, call in enumerate(calls)
        }
        sent = time.perf_counter()
        self._wait_for_weight_updates(max_pending=0)
        loaded = time.perf_counter()
        return {"wait": paused - start, "gather": sent - paused - packed, "write": packed,
                "load": loaded - sent}  # fmt: skip

    def _send_weights(
        self, policy: Policy, cards: Sequence[Sequence[str]]
    ) -> tuple[list[Any], float]:
        """Have ranks send the present weights to every replica, of which each names its `cards`;
        the replicas' calls, and the seconds of packing."""
        workers = list(itertools.chain(*cards))
        stream = secrets.token_hex(8)
        if self._weight_sync == "nccl":
            stream = self._broadcast = self._broadcast or policy.open_broadcast(len(workers))
        given = "receive_weights", stream, self.version
        calls = [self.group.submit(replica, *given) for replica in range(len(self.group))]
        return calls, policy.send_policy(stream, workers, self.dtype)

    def _version_and_num_calls(self, replica: int) -> tuple[int, int]:
        """The version of the present weights, and the calls for trajectories before them."""
        return self.version, self._num_calls[replica]

    def sleep(self) -> None:
        """Give the devices' memory to the training ranks."""
        if self._sleeps:
            self._call_all("engine.sleep")

    def wake_up(self) -> None:
        """Take the memory back, before weights are updated or tokens generated."""
        if self._sleeps:
            self._empty_cache()
            self._call_all("engine.wake_up")

    def busy_share(self) -> float:
        """Since the last call: the share of the time in which an engine sampled, of all a mean."""
        shares = self._call_all("busy_share")
        return float(sum(shares) / len(shares))

    def shutdown(self) -> None:
        """Stop the engines, by force those that do not answer, and all where Ctrl-C hurries."""
        if not isinstance(sys.exception(), KeyboardInterrupt):
            self.group.call_before_shutdown("engine.shutdown")
        self.group.shutdown()

    def _current_weights(self) -> list[tuple[str, int, bool]]:
        """For each replica: the folder of the present weights, their version, whether an adapter"""
        folders = [on_node(self._weights, location.node_id) for location in self.group.locations()]
        present, is_adapter = self.version, self.takes_adapter
        return [(str(folder / str(present)), present, is_adapter) for folder in folders]

    def _call_all(
        self, method: str, given: Callable[[int], tuple[Any, ...]] = lambda replica: ()
    ) -> list[Any]:
        """Call `method` on every replica with what it is `given`; after a loss, start all again and
        ask all again.

        Raises ReplicaLost when they do not start, or `restarts` are used up.
        """
        while True:
            with self._restarting_after_loss():
                calls = [self.group.submit(i, method, *given(i)) for i in range(len(self.group))]
                return self.group.gather(calls, _Liveness(self.group, self._hang_timeout).check)

    @contextlib.contextmanager
    def _restarting_after_loss(self) -> Iterator[None]:
        """Start all replicas again where the body loses one, and ask them for what they had."""
        try:
            yield
        except ReplicaLost as lost:
            self.restarts.spend_on_replicas(lost)
            self._restart()
            for request in self._requests:
                self._submit(request)

    def _submit(self, request: RolloutRequest) -> None:
        """Ask every replica for what is not finished of a request: each finishes what it claims."""
        starts, request.calls = self.group.put(request.starts), {}
        for replica, claims in enumerate(self._claims(request)):
            given = starts, request.sampling, self.version, claims
            request.calls[self.group.submit(replica, "rollout", *given)] = replica
            self._num_calls[replica] += 1

    def _claims(self, request: RolloutRequest) -> list[Claims]:
        """What each replica may finish of it."""
        left, number = request.left, len(self.group)
        groups = [request.starts[i].group for i in left]
        if self._is_divided or number == 1:
            parts = split_groups(groups, number)
            return [Claims([[left[i] for i in part]]) for part in parts]
        self._num_requests += 1
        own = [[left[i] for i in positions] for positions in scheduling_units(groups, number)]
        most = -(-len(left) // number)
        return [Claims(own, most, self._num_requests, self.group.peer(0))] * number

    def _start_weight_updates(self) -> None:
        """Have every replica take the present weights when it can."""
        for replica, present in enumerate(self._current_weights()):
            given = (*present, self._num_calls[replica])
            call = self.group.submit(replica, "update_weights", *given)
            self._weight_updates[call] = replica, self.version

    def _wait_for_weight_updates(self, max_pending: int) -> None:
        """Wait until no more than `max_pending` versions are on their way into replicas."""
        self._handle_answers_until(
            lambda: len({version for _, version in self._weight_updates.values()}) <= max_pending
        )

    def _handle_answers_until(self, is_done: Callable[[], bool]) -> None:
        """Take answers, of requests and of weights on their way, until it is done."""
        while not is_done():
            with self._restarting_after_loss():
                check = _Liveness(self.group, self._hang_timeout).check
                while not is_done():
                    self._handle_answers(check)

    def _handle_answers(self, check: Callable[[], None]) -> None:
        """Take an answer, or several."""
        asked = {call: replica for call, (replica, _) in self._weight_updates.items()}
        for request in self._requests:
            asked |= request.calls
        for call, answer in self.group.poll(asked, check).items():
            if self._weight_updates.pop(call, None) is None:
                self._store_finished(call, answer)

    def _store_finished(self, call: Any, answer: Mapping[int, Trajectory]) -> None:
        """Keep what one call of a request brought."""
        request = next(request for request in self._requests if call in request.calls)
        del request.calls[call]
        request.finished.update(answer)

    def _restart(self) -> None:
        """New actors and engines, with the present weights if there were any yet."""
        self._empty_cache()
        self._weight_updates.clear()
        self._num_calls.clear()
        self._broadcast = None
        self.group.restart()
        try:
            self.group.gather(self.group.start_build(RolloutReplica, self._arguments))
            self.group.call("engine.start")
            if self._policy is not None:
                self.group.call("pause", self.version)
                calls, _ = self._send_weights(self._policy, self.group.call("engine.cards"))
                self.group.gather(calls)
            elif self._is_published:
                update, present = "update_weights", enumerate(self._current_weights())
                self.group.gather([self.group.submit(i, update, *given) for i, given in present])
        except RayTaskError as error:
            raise ReplicaLost(f"the engines do not start again: {cause_of(error)}") from error


class _Liveness:
    """Probes busy replicas, down to the engine: neither a long dialogue nor a tool that is away
    looks like a hang."""

    def __init__(self, group: RayWorkerGroup, hang_timeout: float) -> None:
        self._group, self._hang_timeout = group, hang_timeout
        self._probes = [group.submit(i, "engine.probe") for i in range(len(group))]
        self._answered = [time.monotonic()] * len(group)

    def check(self) -> None:
        """Raise ReplicaLost for one that is dead, or silent for longer than the timeout."""
        now = time.monotonic()
        for i, probe in enumerate(self._probes):
            if self._group.is_done(probe):
                self._group.poll({probe: i})
                self._answered[i], self._probes[i] = now, self._group.submit(i, "engine.probe")
            elif now - self._answered[i] > self._hang_timeout:
                silent = f"no sign of life for {self._hang_timeout:.0f} s"
                raise self._group.lost_error(i, silent)
