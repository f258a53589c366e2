"""The trainer's side of the rollout replicas; if one is lost, all of them are restarted.

A replica has no state that cannot be recreated: its weights are in a folder that the ranks wrote or
are sent again, and each trajectory is determined by its prompt and seed. So after a loss, the
engines restart, load the current weights, and are sent the unfinished trajectories again.
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

from verl.engine import Score
from verl.errors import ReplicaLost, UserError
from verl.packing import split_groups
from verl.rollout.pool import RolloutPool, RolloutRequest
from verl.rollout.replica import RolloutReplica
from verl.single_controller.actors import RayWorkerGroup, Restarts, cause_of
from verl.training.node_folder import new_path, on_node
from verl.types import Sampling, Trajectory, TrajectoryKey

FETCH_TIMEOUT_S = 30.0
"""Seconds to wait for the replicas to report their finished trajectories."""


class Policy(Protocol):
    """The training ranks, as the sender of the policy's weights."""

    def share_policy(
        self, directory: Path, version: int, needed: Sequence[int], dtype: str, is_adapter: bool
    ) -> float:
        """Write the weights to `on_node(directory)/version` on each node; return the seconds.

        Versions that are not `needed` there are removed first.
        """

    def open_broadcast(self, num_receivers: int) -> str:
        """Open a broadcast for `num_receivers` engine workers; return the name of the stream."""

    def send_policy(self, stream: str, cards: Sequence[str], dtype: str) -> float:
        """Send the weights to the engine workers on these cards; return the seconds of sending."""


class RolloutReplicas(RolloutPool):
    """The pool of a run's replicas, hosted by Ray actors."""

    def __init__(
        self,
        group: RayWorkerGroup,
        arguments: Sequence[Sequence[Any]],
        restarts: Restarts,
        takes_adapter: bool = False,
        shares_devices: bool = True,
        overlaps: bool = False,
        hang_timeout: float | None = None,
        empty_cache: Callable[[], object] = lambda: None,
        weight_sync: str = "files",
        weights_root: Path | None = None,
    ) -> None:
        """Actor i hosts `RolloutReplica(*arguments[i])`, also after a restart.

        `takes_adapter`: engines get the policy's adapter alone.
        `shares_devices`: engines share the ranks' devices, so they sleep while the ranks train.
        `overlaps`: engines sample while the ranks train. They never sleep, and `update_weights`
        does not wait until they have loaded the weights.
        `hang_timeout`: seconds after which an engine that does not answer counts as lost.
        `empty_cache`: frees the ranks' cached device memory before the engines allocate theirs.
        `weight_sync`: how the ranks send weights; files are written to `weights_root`, by default
        to each node's memory.
        """
        self.group = group
        self.takes_adapter = takes_adapter
        self.version, self._is_published = 0, False
        self.restarts = restarts
        self.overlaps, self._sleeps = overlaps, shares_devices and not overlaps
        self._arguments = list(arguments)
        self._empty_cache, self._weight_sync = empty_cache, weight_sync
        self._policy: Policy | None = None
        """Sends streamed weights again to restarted engines."""
        self._broadcast: str | None = None
        """The broadcast stream that the current engines have joined."""
        self._hang_timeout = math.inf if hang_timeout is None else hang_timeout
        self._weights = new_path(weights_root)
        self.scored_ids: Sequence[int] = ()
        """Ids that each engine scores after it has loaded weights."""
        self._scores: list[Score] = []
        self._requests: list[RolloutRequest] = []
        self._num_calls: Counter[int] = Counter()
        """Number of `rollout` calls to each replica since it was started."""
        self._weight_updates: dict[Any, tuple[int, int]] = {}
        """Replica and version of each pending call that loads weights."""
        self.dtype = str(self._call_all("dtype")[0])

    def start(
        self, starts: Sequence[Trajectory], sampling: Sampling,
        finished: Mapping[int, Trajectory] | None = None,
    ) -> RolloutRequest:  # fmt: skip
        """Ask the replicas to finish `starts`, except for those `finished` already.

        They sample with the current weights or later ones. One replica samples a whole group, if
        there are enough groups.
        """
        request = RolloutRequest(starts, sampling, dict(finished or {}))
        self._requests.append(request)
        self._submit(request)
        return request

    def finish(self, request: RolloutRequest) -> list[Trajectory]:
        """Wait until all are finished; return them in order. Raises ReplicaLost as `_call_all`."""
        self._handle_answers_until(lambda: not request.calls)
        self._requests.remove(request)
        return request.in_order()

    def fetch_finished(self) -> Callable[[], Mapping[TrajectoryKey, Trajectory]]:
        """Store the results of completed calls, and ask for finished trajectories of pending calls.

        A call returns only with its slowest trajectory. Replicas that are lost or do not answer are
        ignored here; `finish` raises for them.
        """
        pending = [item for request in self._requests for item in request.replicas.items()]
        for call, replica in pending:
            if self.group.is_done(call):
                with contextlib.suppress(UserError, RayError):
                    self._store_finished(call, self.group.poll({call: replica})[call])
        calls = {self.group.submit(i, "finished"): i for i in range(len(self.group))}
        end = time.monotonic() + FETCH_TIMEOUT_S

        def wait() -> dict[TrajectoryKey, Trajectory]:
            finished: dict[TrajectoryKey, Trajectory] = {}
            with contextlib.suppress(UserError, RayError):
                while calls and time.monotonic() < end:
                    for call, trajectories in self.group.poll(calls).items():
                        finished |= trajectories
                        del calls[call]
            return finished

        return wait

    def abandon(self, request: RolloutRequest) -> None:
        """Cancel the pending calls of a request whose trajectories are no longer needed."""
        self._requests.remove(request)
        self.group.cancel(list(request.calls))

    def update_weights(self, policy: Policy) -> dict[str, float]:
        """Transfer the policy's current weights (or its adapter alone) to all engines.

        A replica loads them as `RolloutReplica.update_weights` describes. At most one earlier
        version may still be loading when a new one is written. Returns the seconds of each phase:
        waiting for earlier versions, gathering and writing by the ranks, loading by the engines.
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

    def take_scores(self) -> list[Score]:
        """Return the engines' scores of `scored_ids` that arrived since the last call."""
        scores, self._scores = self._scores, []
        return scores

    def _stream_weights(self, policy: Policy) -> dict[str, float]:
        """Send the weights from ranks to engines directly; return the seconds of each phase."""
        start, cards = time.perf_counter(), self._call_all("engine.cards")
        self.version, self._is_published, self._policy = self.version + 1, True, policy
        self._call_all("pause", self._version_and_num_calls)
        paused = time.perf_counter()
        calls, packed = self._send_weights(policy, cards)
        for replica, call in enumerate(calls):
            self._weight_updates[call] = replica, self.version
        sent = time.perf_counter()
        self._wait_for_weight_updates(max_pending=0)
        loaded = time.perf_counter()
        return {"wait": paused - start, "gather": sent - paused - packed, "write": packed,
                "load": loaded - sent}  # fmt: skip

    def _send_weights(self, policy: Policy, cards: list[list[str]]) -> tuple[list[Any], float]:
        """Send the weights to the replicas' devices; returns pending calls and packing seconds."""
        workers = list(itertools.chain(*cards))
        stream = secrets.token_hex(8)
        if self._weight_sync == "nccl":
            stream = self._broadcast = self._broadcast or policy.open_broadcast(len(workers))
        arguments = stream, self.version, *self._scored()
        replicas = range(len(self.group))
        calls = [self.group.submit(i, "receive_weights", *arguments) for i in replicas]
        return calls, policy.send_policy(stream, workers, self.dtype)

    def _scored(self) -> list[Sequence[int]]:
        """Return the last argument of calls that load weights, if they are to score ids."""
        return [self.scored_ids] if self.scored_ids else []

    def _version_and_num_calls(self, replica: int) -> tuple[int, int]:
        """Return the current version and the number of `rollout` calls made before it."""
        return self.version, self._num_calls[replica]

    def sleep(self) -> None:
        if self._sleeps:
            self._call_all("engine.sleep")

    def wake_up(self) -> None:
        """Allocate device memory again, before weights are updated or tokens generated."""
        if self._sleeps:
            self._empty_cache()
            self._call_all("engine.wake_up")

    def busy_share(self) -> float:
        """Return the mean share of time since the last call in which an engine sampled."""
        shares = self._call_all("busy_share")
        return float(sum(shares) / len(shares))

    def shutdown(self) -> None:
        """Stop the engines; kill those that do not answer, and all of them after Ctrl-C."""
        if not isinstance(sys.exception(), KeyboardInterrupt):
            self.group.call_before_shutdown("engine.shutdown")
        self.group.shutdown()

    def _current_weights(self) -> list[tuple[str, int, bool]]:
        """Return (folder, version, whether it is an adapter) of the weights for each replica."""
        folders = [on_node(self._weights, location.node_id) for location in self.group.locations()]
        version = self.version
        return [(str(folder / str(version)), version, self.takes_adapter) for folder in folders]

    def _call_all(
        self, method: str, arguments: Callable[[int], tuple[Any, ...]] = lambda replica: ()
    ) -> list[Any]:
        """Call `method` on every replica i with `arguments(i)`; repeat after a restart.

        Raises ReplicaLost if the replicas do not start again, or `restarts` are used up.
        """
        while True:
            with self._restarting_after_loss():
                replicas = range(len(self.group))
                calls = [self.group.submit(i, method, *arguments(i)) for i in replicas]
                return self.group.gather(calls, _Liveness(self.group, self._hang_timeout).check)

    @contextlib.contextmanager
    def _restarting_after_loss(self) -> Iterator[None]:
        """If the body loses a replica, restart all of them and resubmit their requests."""
        try:
            yield
        except ReplicaLost as lost:
            self.restarts.spend_on_replicas(lost)
            self._restart()
            for request in self._requests:
                self._submit(request)

    def _submit(self, request: RolloutRequest) -> None:
        """Divide the unfinished trajectories among the replicas.

        All at once: while the ranks train, nobody could give a replica that is done the next group.
        """
        unfinished, request.calls = request.unfinished, {}
        parts = split_groups([request.starts[i].group for i in unfinished], len(self.group))
        for replica, part in enumerate(parts):
            positions = [unfinished[i] for i in part]
            arguments = [request.starts[i] for i in positions], request.sampling, self.version
            call = self.group.submit(replica, "rollout", *arguments)
            request.calls[call] = replica, positions
            self._num_calls[replica] += 1

    def _start_weight_updates(self) -> None:
        """Have every replica load the current weights as soon as it can."""
        for replica, weights in enumerate(self._current_weights()):
            arguments = (*weights, self._num_calls[replica], *self._scored())
            call = self.group.submit(replica, "update_weights", *arguments)
            self._weight_updates[call] = replica, self.version

    def _wait_for_weight_updates(self, max_pending: int) -> None:
        """Wait until at most `max_pending` versions are still being loaded by replicas."""
        self._handle_answers_until(
            lambda: len({version for _, version in self._weight_updates.values()}) <= max_pending
        )

    def _handle_answers_until(self, is_done: Callable[[], bool]) -> None:
        """Handle answers of rollout and weight update calls until `is_done` returns true."""
        while not is_done():
            with self._restarting_after_loss():
                check = _Liveness(self.group, self._hang_timeout).check
                while not is_done():
                    self._handle_answers(check)

    def _handle_answers(self, check: Callable[[], None]) -> None:
        """Wait a few seconds for any pending call; handle the answers that arrived."""
        calls = {call: replica for call, (replica, _) in self._weight_updates.items()}
        for request in self._requests:
            calls |= request.replicas
        for call, answer in self.group.poll(calls, check).items():
            if self._weight_updates.pop(call, None) is None:
                self._store_finished(call, answer)
            elif answer is not None:
                self._scores.append(answer)

    def _store_finished(self, call: Any, trajectories: Sequence[Trajectory]) -> None:
        """Add the result of a completed `rollout` call to its request."""
        request = next(request for request in self._requests if call in request.calls)
        _, positions = request.calls.pop(call)
        request.finished.update(zip(positions, trajectories, strict=True))

    def _restart(self) -> None:
        """Start new actors and engines, and load the current weights if there are any yet."""
        self._empty_cache()
        self._weight_updates.clear()
        self._num_calls.clear()
        self._broadcast = None
        self.group.restart()
        try:
            self.group.gather(self.group.start_build(RolloutReplica, self._arguments))
            self.group.call("engine.start_for_training")
            if self._policy is not None:
                self.group.call("pause", self.version)
                calls, _ = self._send_weights(self._policy, self.group.call("engine.cards"))
                self._scores += filter(None, self.group.gather(calls))
            elif self._is_published:
                weights = enumerate(self._current_weights())
                calls = [
                    self.group.submit(i, "update_weights", *args, 0, *self._scored())
                    for i, args in weights
                ]
                self._scores += filter(None, self.group.gather(calls))
        except RayTaskError as error:
            raise ReplicaLost(f"the engines do not start again: {cause_of(error)}") from error


class _Liveness:
    """Probes busy replicas' engines, which answer even during long dialogues and tool outages."""

    def __init__(self, group: RayWorkerGroup, hang_timeout: float) -> None:
        self._group, self._hang_timeout = group, hang_timeout
        self._probes = [group.submit(i, "engine.probe") for i in range(len(group))]
        self._answered_at = [time.monotonic()] * len(group)

    def check(self) -> None:
        """Raise ReplicaLost if a replica died or has not answered within the timeout."""
        now = time.monotonic()
        for i, probe in enumerate(self._probes):
            if self._group.is_done(probe):
                self._group.poll({probe: i})  # raises if the probe failed
                self._answered_at[i] = now
                self._probes[i] = self._group.submit(i, "engine.probe")
            elif now - self._answered_at[i] > self._hang_timeout:
                cause = f"no sign of life for {self._hang_timeout:.0f} s"
                raise self._group.lost_error(i, cause)
