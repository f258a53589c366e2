"""The trainer's side of the rollout replicas; if one is lost, all of them are restarted.

A replica has no state that cannot be recreated: its weights are in a folder that the ranks wrote or
are sent again, and each trajectory is determined by its prompt and seed. So after a loss, the
engines restart, load the current weights, and are sent the unfinished trajectories again.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ray.exceptions import RayError, RayTaskError

from verl.engine import Score
from verl.errors import ReplicaLost, UserError
from verl.packing import split_groups
from verl.rollout.rollouts import RolloutRequest, TrainedRollouts
from verl.single_controller.actors import RayWorkerGroup, Restarts, cause_of
from verl.types import Sampling, Trajectory, TrajectoryKey
from verl.weights.files import Ranks, Transport

FETCH_TIMEOUT_S = 30.0
"""Seconds to wait for the replicas to report their finished trajectories."""


class RolloutReplicas(TrainedRollouts):
    """The replicas of a run, hosted by Ray actors."""

    def __init__(
        self,
        group: RayWorkerGroup,
        rebuild: Callable[[], list[Any]],
        restarts: Restarts,
        transport: Transport,
        shares_devices: bool = True,
        overlaps: bool = False,
        hang_timeout: float | None = None,
        empty_cache: Callable[[], object] = lambda: None,
    ) -> None:
        """`rebuild`: starts to build the hosted replicas again, in new actors.

        `transport`: the way of new weights from the ranks.
        `shares_devices`: engines share the ranks' devices, so they sleep while the ranks train.
        `overlaps`: engines sample while the ranks train. They never sleep, and `update_weights`
        does not wait until they have loaded the weights.
        `hang_timeout`: seconds after which an engine that does not answer counts as lost.
        `empty_cache`: frees the ranks' cached device memory before the engines allocate theirs.
        """
        self.group = group
        self.version = 0
        self.restarts = restarts
        self.overlaps, self._sleeps = overlaps, shares_devices and not overlaps
        self._rebuild = rebuild
        self._empty_cache, self._transport = empty_cache, transport
        self._hang_timeout = math.inf if hang_timeout is None else hang_timeout
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

    def update_weights(self, ranks: Ranks, version: int) -> dict[str, float]:
        """Transfer the policy's current weights to all engines.

        A replica loads them as `RolloutReplica.update_weights` describes. At most one earlier
        version may still be loading when a new one is sent. Returns the seconds of each phase:
        waiting for earlier versions, gathering and writing by the ranks, loading by the engines.
        """
        start = time.perf_counter()
        self._wait_for_weight_updates(max_pending=1)
        seconds, waited = {"gather": 0.0, "write": 0.0}, time.perf_counter() - start
        with self._restarting_after_loss():  # the new engines are sent this version then
            seconds = self._transport.send(ranks, self, version)
        self.version, self.sent = version, self._transport.metrics
        sent = time.perf_counter()
        if not self.overlaps:
            self._wait_for_weight_updates(max_pending=0)
        wait = waited + seconds.pop("wait", 0.0)
        return {"wait": wait, **seconds, "load": time.perf_counter() - sent}

    @property
    def loading(self) -> list[int]:
        """The versions that replicas are still loading."""
        return sorted({version for _, version in self._weight_updates.values()})

    def pause(self, version: int) -> None:
        """As `Engines.pause`; without overlap nothing samples anyway."""
        if self.overlaps:
            self.call("pause", lambda replica: (version, self._num_calls[replica]))

    def load(self, sources: Sequence[str], version: int) -> None:
        """As `Engines.load`; the answers may be scores."""
        for replica, source in enumerate(sources):
            num_calls = (self._num_calls[replica],) if self.overlaps else ()
            arguments = source, version, self.scored_ids, *num_calls
            call = self.group.submit(replica, "update_weights", *arguments)
            self._weight_updates[call] = replica, version

    def take_scores(self) -> list[Score]:
        """Return the engines' scores of `scored_ids` that arrived since the last call."""
        scores, self._scores = self._scores, []
        return scores

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

    def call(
        self, method: str, arguments: Callable[[int], tuple[Any, ...]] = lambda replica: ()
    ) -> list[Any]:
        """Call `method` on every replica i with `arguments(i)`. Raises ReplicaLost."""
        replicas = range(len(self.group))
        calls = [self.group.submit(i, method, *arguments(i)) for i in replicas]
        return self.group.gather(calls, _Liveness(self.group, self._hang_timeout).check)

    def _call_all(self, method: str) -> list[Any]:
        """Call `method` on every replica; repeat after a restart.

        Raises ReplicaLost if the replicas do not start again, or `restarts` are used up.
        """
        while True:
            with self._restarting_after_loss():
                return self.call(method)

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
            arguments = [request.starts[i] for i in positions], request.sampling
            version = (self.version,) if self.overlaps else ()
            call = self.group.submit(replica, "rollout", *arguments, *version)
            request.calls[call] = replica, positions
            self._num_calls[replica] += 1

    def _wait_for_weight_updates(self, max_pending: int) -> None:
        """Wait until at most `max_pending` versions are still being loaded by replicas."""
        self._handle_answers_until(lambda: len(self.loading) <= max_pending)

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
        self.group.restart()
        try:
            self.group.gather(self._rebuild())
            self.group.call("engine.start_for_training")
            self._transport.resend(self)
            self._scores += filter(None, self.group.gather(list(self._weight_updates)))
            self._weight_updates.clear()
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
