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
from verl.packing import split_groups, together
from verl.rollout.in_flight import Claims, Engines, InFlight
from verl.rollout.replica import RolloutReplica
from verl.single_controller.actors import RayWorkerGroup, Restarts, cause_of
from verl.training.node_folder import new_path, on_node
from verl.types import Name, Sampling, Trajectory

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


class RolloutReplicas(Engines):
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
        self._flights: list[InFlight] = []
        self._num_calls: Counter[int] = Counter()
        """For trajectories, of each replica since it was started."""
        self._adopting: dict[Any, tuple[int, int]] = {}
        """Replica and version of each call that brings weights and is not answered yet."""
        self.dtype = str(self._ask("dtype")[0])

    def start(
        self, starts: Sequence[Trajectory], sampling: Sampling,
        finished: Mapping[int, Trajectory] | None = None,
    ) -> InFlight:  # fmt: skip
        """Ask for `starts`, those of one group of one replica, by the present weights or later; for
        those that are not `finished`."""
        flight = InFlight(starts, sampling, dict(finished or {}))
        self._flights.append(flight)
        self._submit(flight)
        return flight

    def finish(self, flight: InFlight) -> list[Trajectory]:
        """Wait until all are finished, in their order. Raises ReplicaLost as `_ask` does."""
        self._until(lambda: not flight.calls)
        self._flights.remove(flight)
        return flight.in_order()

    def unanswered(self) -> Callable[[], Mapping[Name, Trajectory]]:
        """Take what is answered by now, and ask for what is finished in calls that are not, which
        wait for the slowest. A replica that is lost, or silent, has nothing: whoever waits for it
        is told."""
        for call, replica in [c for flight in self._flights for c in flight.calls.items()]:
            if self.group.is_done(call):
                with contextlib.suppress(UserError, RayError):
                    self._take(call, self.group.answers({call: replica})[call])
        asked = {self.group.submit(i, "finished"): i for i in range(len(self.group))}
        end = time.monotonic() + PATIENCE_S

        def wait() -> dict[Name, Trajectory]:
            found: dict[Name, Trajectory] = {}
            with contextlib.suppress(UserError, RayError):
                while asked and time.monotonic() < end:
                    for call, answer in self.group.answers(asked).items():
                        found |= answer
                        del asked[call]
            return found

        return wait

    def abandon(self, flight: InFlight) -> None:
        """Stop what is still sampled of it."""
        self._flights.remove(flight)
        self.group.cancel(list(flight.calls))

    def update_weights(self, policy: Policy) -> dict[str, float]:
        """Bring the present policy into every engine; where engines take adapters, that alone.

        A replica takes it as soon as what it samples is whole; until every one has taken the
        version before, the next is not written. Returns the seconds of each part: ranks gather and
        write, engines load.
        """
        start = time.perf_counter()
        self._settle(most=1)
        if self._weight_sync != "files":
            return self._stream(policy)
        waited, version = time.perf_counter(), self.version + 1
        needed = sorted({version for _, version in self._adopting.values()})
        write = policy.share_policy(self._weights, version, needed, self.dtype, self.takes_adapter)
        written, self.version, self._is_published = time.perf_counter(), version, True
        self._adopt()
        if not self.overlaps:
            self._settle(most=0)
        loaded = time.perf_counter()
        return {"wait": waited - start, "gather": written - waited - write, "write": write,
                "load": loaded - written}  # fmt: skip

    def _stream(self, policy: Policy) -> dict[str, float]:
        """Have ranks send the present policy while engines load it; the seconds of each part."""
        start, cards = time.perf_counter(), self._ask("engine.cards")
        self.version, self._is_published, self._policy = self.version + 1, True, policy
        self._ask("pause", self._next)
        paused = time.perf_counter()
        calls, packed = self._send(policy, cards)
        self._adopting |= {call: (replica, self.version) for replica, call in enumerate(calls)}
        sent = time.perf_counter()
        self._settle(most=0)
        loaded = time.perf_counter()
        return {"wait": paused - start, "gather": sent - paused - packed, "write": packed,
                "load": loaded - sent}  # fmt: skip

    def _send(self, policy: Policy, cards: Sequence[Sequence[str]]) -> tuple[list[Any], float]:
        """Have ranks send the present weights to every replica, of which each names its `cards`;
        the replicas' calls, and the seconds of packing."""
        workers = list(itertools.chain(*cards))
        stream = secrets.token_hex(8)
        if self._weight_sync == "nccl":
            stream = self._broadcast = self._broadcast or policy.open_broadcast(len(workers))
        given = "receive_weights", stream, self.version
        calls = [self.group.submit(replica, *given) for replica in range(len(self.group))]
        return calls, policy.send_policy(stream, workers, self.dtype)

    def _next(self, replica: int) -> tuple[int, int]:
        """The version of the present weights, and the calls for trajectories before them."""
        return self.version, self._num_calls[replica]

    def sleep(self) -> None:
        """Give the devices' memory to the training ranks."""
        if self._sleeps:
            self._ask("engine.sleep")

    def wake_up(self) -> None:
        """Take the memory back, before weights are updated or tokens generated."""
        if self._sleeps:
            self._empty_cache()
            self._ask("engine.wake_up")

    def busy_share(self) -> float:
        """Since the last call: the share of the time in which an engine sampled, of all a mean."""
        shares = self._ask("busy_share")
        return float(sum(shares) / len(shares))

    def shutdown(self) -> None:
        """Stop the engines, by force those that do not answer, and all where Ctrl-C hurries."""
        if not isinstance(sys.exception(), KeyboardInterrupt):
            self.group.last_call("engine.shutdown")
        self.group.shutdown()

    def _present(self) -> list[tuple[str, int, bool]]:
        """For each replica: the folder of the present weights, their version, whether an adapter"""
        folders = [on_node(self._weights, place.node_id) for place in self.group.places()]
        present, is_adapter = self.version, self.takes_adapter
        return [(str(folder / str(present)), present, is_adapter) for folder in folders]

    def _ask(
        self, method: str, given: Callable[[int], tuple[Any, ...]] = lambda replica: ()
    ) -> list[Any]:
        """Call `method` on every replica with what it is `given`; after a loss, start all again and
        ask all again.

        Raises ReplicaLost when they do not start, or `restarts` are used up.
        """
        while True:
            with self._starting_again():
                calls = [self.group.submit(i, method, *given(i)) for i in range(len(self.group))]
                return self.group.gather(calls, _Liveness(self.group, self._hang_timeout).check)

    @contextlib.contextmanager
    def _starting_again(self) -> Iterator[None]:
        """Start all replicas again where the body loses one, and ask them for what they had."""
        try:
            yield
        except ReplicaLost as lost:
            self.restarts.spend_on_replicas(lost)
            self._start_again()
            for flight in self._flights:
                self._submit(flight)

    def _submit(self, flight: InFlight) -> None:
        """Ask every replica for what is not finished of a flight: each finishes what it claims."""
        starts, flight.calls = self.group.share(flight.starts), {}
        for replica, claims in enumerate(self._claims(flight)):
            given = starts, flight.sampling, self.version, claims
            flight.calls[self.group.submit(replica, "rollout", *given)] = replica
            self._num_calls[replica] += 1

    def _claims(self, flight: InFlight) -> list[Claims]:
        """What each replica may finish of it."""
        left, number = flight.left, len(self.group)
        groups = [flight.starts[i].group for i in left]
        if self._is_divided or number == 1:
            parts = split_groups(groups, number)
            return [Claims([[left[i] for i in part]]) for part in parts]
        self._num_requests += 1
        own = [[left[i] for i in positions] for positions in together(groups, number)]
        most = -(-len(left) // number)
        return [Claims(own, most, self._num_requests, self.group.peer(0))] * number

    def _adopt(self) -> None:
        """Have every replica take the present weights when it can."""
        for replica, present in enumerate(self._present()):
            given = (*present, self._num_calls[replica])
            call = self.group.submit(replica, "update_weights", *given)
            self._adopting[call] = replica, self.version

    def _settle(self, most: int) -> None:
        """Wait until no more than `most` versions are on their way into replicas."""
        self._until(lambda: len({version for _, version in self._adopting.values()}) <= most)

    def _until(self, is_done: Callable[[], bool]) -> None:
        """Take answers, of flights and of weights on their way, until it is done."""
        while not is_done():
            with self._starting_again():
                check = _Liveness(self.group, self._hang_timeout).check
                while not is_done():
                    self._hear(check)

    def _hear(self, check: Callable[[], None]) -> None:
        """Take an answer, or several."""
        asked = {call: replica for call, (replica, _) in self._adopting.items()}
        for flight in self._flights:
            asked |= flight.calls
        for call, answer in self.group.answers(asked, check).items():
            if self._adopting.pop(call, None) is None:
                self._take(call, answer)

    def _take(self, call: Any, answer: Mapping[int, Trajectory]) -> None:
        """Keep what one call of a flight brought."""
        flight = next(flight for flight in self._flights if call in flight.calls)
        del flight.calls[call]
        flight.finished.update(answer)

    def _start_again(self) -> None:
        """New actors and engines, with the present weights if there were any yet."""
        self._empty_cache()
        self._adopting.clear()
        self._num_calls.clear()
        self._broadcast = None
        self.group.restart()
        try:
            self.group.gather(self.group.start_build(RolloutReplica, self._arguments))
            self.group.call("engine.start")
            if self._policy is not None:
                self.group.call("pause", self.version)
                calls, _ = self._send(self._policy, self.group.call("engine.cards"))
                self.group.gather(calls)
            elif self._is_published:
                update, present = "update_weights", enumerate(self._present())
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
                self._group.answers({probe: i})
                self._answered[i], self._probes[i] = now, self._group.submit(i, "engine.probe")
            elif now - self._answered[i] > self._hang_timeout:
                silent = f"no sign of life for {self._hang_timeout:.0f} s"
                raise self._group.lost(i, silent)
