"""Groups of Ray actors: how they are called and shut down, and how a dead actor is noticed.

An `ActorHost` is an empty Ray actor that first reports where it was placed and only later builds
the object it hosts, so that a group knows its addresses and devices before any heavy work starts.
A rank that dies breaks the collective operation its peers are in, and their errors may arrive
before Ray reports the death. They do not say which rank is missing.
"""

from __future__ import annotations

import gc
import inspect
import logging
import operator
import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import PlacementGroup, remove_placement_group

from verl.errors import UserError
from verl.training.network import secret_variables

logger = logging.getLogger(__name__)

DEATH_NOTICE_S = 10.0
"""Seconds to wait, after an actor's error, for Ray to report another actor's death as its cause."""
NODE_DEATH_NOTICE_S = 60.0
"""The same where a rank could not reach another: Ray takes that long to declare a node dead."""
POLL_S = 5.0
"""Seconds that `RayWorkerGroup.poll` waits for a result."""
MAX_RECORDED_CALLS = 1000
"""Number of calls that an actor remembers until they are taken, the latest ones."""
SHUTDOWN_CALL_S = 30.0
"""Seconds that actors may take to shut down in an orderly way, before they are killed."""
DEATHS = (RayActorError, ActorUnschedulableError, NodeDiedError, ObjectLostError, OutOfMemoryError)
"""Errors of a call whose process or node is gone."""
CAUSES = (
    (re.compile(r"memory monitor|low on memory|OutOfMemoryError", re.IGNORECASE),
     "killed, or its node was short of memory"),
    (re.compile(r"node (?:has )?died|node failure|NODE_DIED|node was terminated", re.IGNORECASE),
     "its node is lost"),
)  # fmt: skip
"""Patterns in Ray's message of a death, and the cause to report for each."""
COLLECTIVE = re.compile(r"gloo|nccl|connection (?:closed|reset) by peer", re.IGNORECASE)
EXIT_DETAIL = re.compile(r"Worker exit detail: (.*?)(?:\.\s|\.?$)", re.DOTALL)
PendingResults = Callable[[], list[Any]]
"""Waits for the results of calls that were started, in the order of the actors."""


@dataclass(frozen=True)
class ActorLocation:
    """Node, address, GPUs and process of an actor."""

    node_id: str
    host: str
    gpu_ids: tuple[str, ...]
    pid: int = 0


class Call(NamedTuple):
    """A finished call of a hosted object; times are seconds since the epoch by its clock."""

    method: str
    begin: float
    end: float


def current_location() -> ActorLocation:
    """Return the location of the calling actor or task."""
    context = ray.get_runtime_context()
    gpu_ids = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", []))
    address = ray.util.get_node_ip_address()
    return ActorLocation(context.get_node_id(), address, gpu_ids, os.getpid())


def set_environment(variables: Mapping[str, str]) -> None:
    """Set environment variables of the driver that must not appear in Ray's logs."""
    os.environ |= variables


@ray.remote
class ActorHost:
    """An actor that hosts one object, built on request."""

    def __init__(self) -> None:
        gc.disable()  # until `build`, whose imports create a million objects that are never freed
        self.hosted: Any = None
        self._calls: deque[Call] = deque(maxlen=MAX_RECORDED_CALLS)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in this actor's process."""
        return function(*args)

    async def build(self, factory: Callable[..., Any], *args: Any) -> None:
        """Build the hosted object."""
        try:
            self.hosted = factory(*args)
        finally:
            gc.enable()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a sync or async method of the hosted object, or of an attribute (`name.method`)."""
        begin = time.time()
        result = operator.attrgetter(method)(self.hosted)(*args)
        value = await result if inspect.isawaitable(result) else result
        self._calls.append(Call(method, begin, time.time()))
        return value

    async def take_calls(self) -> list[Call]:
        """Return the calls finished since the last time, at most `MAX_RECORDED_CALLS`."""
        calls, self._calls = list(self._calls), deque(maxlen=MAX_RECORDED_CALLS)
        return calls


class RayWorkerGroup:
    """Actors that are called together; results are in their order."""

    def __init__(
        self, options: Sequence[Any], name: str, lost: type[UserError],
        placement: PlacementGroup | None = None, deaths: tuple[type[Exception], ...] = (),
        clean_up: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """`options[i].remote()` creates actor i; `name` is what messages call an actor.

        `lost` is the error to raise when an actor is gone, `deaths` are further errors that mean
        that a hosted object is dead though its actor lives. `clean_up` is called in each actor
        that takes the place of another, to end what is left of that.
        """
        self.name = name
        self._lost, self._deaths = lost, (*DEATHS, *deaths)
        self._options = list(options)
        self._placement, self._clean_up = placement, clean_up
        self._locations: list[ActorLocation] = []
        self.hosts = self._start()

    def _start(self) -> list[Any]:
        """Start new actors and give them the driver's secrets before any other call."""
        hosts = [option.remote() for option in self._options]
        if secrets := secret_variables(os.environ):
            for host in hosts:
                host.run.remote(set_environment, secrets)
        return hosts

    def __len__(self) -> int:
        return len(self.hosts)

    def locations(self) -> list[ActorLocation]:
        """Return where each actor runs."""
        if not self._locations:
            self._locations = self.run(current_location)
        return self._locations

    def run(
        self, function: Callable[..., Any], *args: Any, on: Sequence[int] | None = None
    ) -> list[Any]:
        """Call a function in the process of every actor, or of those numbered `on`."""
        hosts = self.hosts if on is None else [self.hosts[i] for i in on]
        return self.gather([host.run.remote(function, *args) for host in hosts])

    def start_build(self, factory: Callable[..., Any], args: Sequence[Sequence[Any]]) -> list[Any]:
        """Start building the hosted objects, with `args[i]` for actor i; returns Ray references."""
        pairs = zip(self.hosts, args, strict=True)
        return [host.build.remote(factory, *arguments) for host, arguments in pairs]

    def submit(self, index: int, method: str, *args: Any) -> Any:
        """Start a call on one actor; returns a Ray reference."""
        return self.hosts[index].call.remote(method, *args)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Make the same call on every actor and return the results."""
        return self.begin(method, *args)()

    def scatter(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        """Call actor i with `shards[i]` as its first argument and return the results."""
        return self.begin_scatter(method, shards, *args)()

    def begin(self, method: str, *args: Any) -> PendingResults:
        """Start the same call on every actor."""
        calls = [self.submit(i, method, *args) for i in range(len(self))]
        return lambda: self.gather(calls)

    def begin_scatter(self, method: str, shards: Sequence[Any], *args: Any) -> PendingResults:
        """Start a call on every actor, with `shards[i]` as the first argument of actor i."""
        assert len(shards) == len(self), f"{len(shards)} shards for {len(self)} actors"
        calls = [self.submit(i, method, s, *args) for i, s in enumerate(shards)]
        return lambda: self.gather(calls)

    def gather(self, calls: Sequence[Any], check: Callable[[], None] = lambda: None) -> list[Any]:
        """Wait for `calls`, one call per actor, and return their results in order.

        Raises as soon as one call fails, since the others may be waiting for it forever: the
        group's error when an actor is gone, otherwise the error of the hosted object. `check` is
        called every few seconds while waiting, and may raise too.
        """
        actors = {call: i for i, call in enumerate(calls)}
        results: dict[Any, Any] = {}
        while len(results) < len(actors):
            results |= self.poll({c: i for c, i in actors.items() if c not in results}, check)
        return [results[call] for call in calls]

    def poll(
        self, actors: Mapping[Any, int], check: Callable[[], None] = lambda: None
    ) -> dict[Any, Any]:
        """Wait up to `POLL_S` for one of the calls to finish; return its result, if it did.

        `actors` maps each call to the index of its actor. Raises, and calls `check`, as `gather`.
        """
        results: dict[Any, Any] = {}
        done, _ = ray.wait(list(actors), num_returns=1, timeout=POLL_S)
        for call in done:
            try:
                results[call] = ray.get(call)
            except RayError as error:
                self._raise(error, actors, actors[call])
        check()
        return results

    def take_calls(self) -> list[list[Call]]:
        """Return each actor's calls since the last time."""
        return self.gather([host.take_calls.remote() for host in self.hosts])

    def is_done(self, call: Any) -> bool:
        """Whether a call has finished or failed."""
        return bool(ray.wait([call], timeout=0)[0])

    def _raise(self, error: RayError, actors: Mapping[Any, int], index: int) -> NoReturn:
        """Raise the group's error if a death caused the error of actor `index`, else that error."""
        if isinstance(error, self._deaths):
            raise self.lost_error(index, cause_of(error)) from error
        if isinstance(error, RayTaskError) and isinstance(error.cause, UserError):
            raise error.cause from None  # Ray's own text is the actor's traceback
        is_collective = broke_collective(error)
        dead = self._find_dead(actors, NODE_DEATH_NOTICE_S if is_collective else DEATH_NOTICE_S)
        if dead is not None:
            raise self.lost_error(*dead) from error
        if is_collective:
            raise self.lost_error(index, f"cut off from the others ({cause_of(error)})") from error
        raise error

    def _find_dead(self, actors: Mapping[Any, int], seconds: float) -> tuple[int, str] | None:
        """Return the first dead actor and the cause; None if all respond or the time is up."""
        hosts = enumerate(self.hosts)
        actors = {**actors, **{host.run.remote(current_location): i for i, host in hosts}}
        pending, end = list(actors), time.monotonic() + seconds
        while pending and time.monotonic() < end:
            done, pending = ray.wait(pending, timeout=max(0.0, end - time.monotonic()))
            for call in done:
                try:
                    ray.get(call)
                except RayError as error:
                    # A RayTaskError, even with a death as its cause, comes from a living actor.
                    if isinstance(error, DEATHS) and not isinstance(error, RayTaskError):
                        return actors[call], cause_of(error)
        return None

    def lost_error(self, index: int, cause: str) -> UserError:
        """Return the error for a lost actor, with its node and process if known."""
        location = self._locations[index] if self._locations else None
        where = f" on node {location.host} (process {location.pid})" if location else ""
        return self._lost(f"{self.name} {index}{where} is lost: {cause}")

    def restart(self) -> None:
        """Replace every actor by an empty one, after cleaning up after the old ones.

        Raises the group's error if an actor can no longer be placed.
        """
        for host in self.hosts:
            ray.kill(host)
        self.hosts = self._start()
        if self._clean_up is not None:
            self.run(self._clean_up)
        self._locations = []
        self.locations()

    def call_before_shutdown(self, method: str) -> None:
        """Call a method on every actor and wait up to `SHUTDOWN_CALL_S`; ignores its outcome."""
        calls = [self.submit(i, method) for i in range(len(self))]
        ray.wait(calls, num_returns=len(calls), timeout=SHUTDOWN_CALL_S)

    def shutdown(self) -> None:
        """Kill the actors and release their resources."""
        for host in self.hosts:
            ray.kill(host)
        if self._placement is not None:
            remove_placement_group(self._placement)


def cause_of(error: BaseException) -> str:
    """Return in a few words why an actor failed or its process died."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[-1]}"
    text = str(error).strip()
    for pattern, description in CAUSES:
        if pattern.search(text):
            return description
    if detail := EXIT_DETAIL.search(text):
        return detail.group(1)
    return text.splitlines()[0] if text else type(error).__name__


def broke_collective(error: BaseException) -> bool:
    """Whether a rank failed because it could not communicate with another."""
    if not isinstance(error, RayTaskError):
        return False
    cause = error.cause
    # By name, without importing torch: an actor that hosts nothing yet starts without it.
    if any(kind.__name__ == "DistError" for kind in type(cause).__mro__):
        return True
    return isinstance(cause, RuntimeError) and bool(COLLECTIVE.search(str(cause)))


@dataclass
class Restarts:
    """Counts restarts since the command began, of `trainer.max_restarts` (`allowed`)."""

    allowed: int
    of_replicas: int = 0
    of_run: int = 0

    def spend_on_replicas(self, error: UserError) -> None:
        """Count a restart of the engines; raises the error where no more are allowed."""
        self._spend(error, "all engines restart and repeat their requests")
        self.of_replicas += 1

    def spend_on_run(self, error: UserError, start: str) -> None:
        """Count a restart of the run from `start`; raises the error where no more are allowed."""
        self._spend(error, f"the run starts again from {start}")
        self.of_run += 1

    def metrics(self) -> dict[str, float]:
        """Return the counts so far."""
        counts = {"replica_restarts": self.of_replicas, "run_restarts": self.of_run}
        return {f"fault/{name}": float(count) for name, count in counts.items()}

    def _spend(self, error: UserError, consequence: str) -> None:
        spent = self.of_replicas + self.of_run
        if spent >= self.allowed:
            raise type(error)(
                f"{error}; the run ends, after {spent} of trainer.max_restarts={self.allowed} "
                "restarts: find out why, then continue with trainer.resume_mode=auto"
            ) from error
        count = f"restart {spent + 1} of trainer.max_restarts={self.allowed}"
        logger.warning("%s; %s (%s)", error, consequence, count)
