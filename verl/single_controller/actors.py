"""Groups of Ray actors: how they are called and shut down.

An `ActorHost` is an empty Ray actor that first reports where it was placed and only later builds
the object it hosts, so that a group knows its addresses and devices before any heavy work starts.
"""

from __future__ import annotations

import gc
import logging
import operator
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from verl.errors import UserError
from verl.single_controller.calls import note
from verl.single_controller.deaths import DEATHS, raise_cause
from verl.training.network import share_secrets

logger = logging.getLogger(__name__)

POLL_S = 5.0
"""Seconds that `RayWorkerGroup.poll` waits for a result."""
SHUTDOWN_CALL_S = 30.0
"""Seconds that actors may take to shut down in an orderly way, before they are killed."""
RELEASE_S = 10.0
"""Seconds to wait for Ray to release resources. If Ray has ended, as after a signal to all
processes of a job, it would never answer; and the resources have ended with it."""
PendingResults = Callable[[], list[Any]]
"""Waits for the results of calls that were started, in the order of the actors."""


@dataclass(frozen=True)
class ActorLocation:
    """Node, address, GPUs and process of an actor."""

    node_id: str
    host: str
    gpu_ids: tuple[str, ...]
    pid: int = 0


def bounded(work: Callable[[], Any], seconds: float) -> bool:
    """Do `work` in another thread, for up to `seconds`; return whether it ended, or raise as it."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised below, unless nobody waits any more
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if wait([done], seconds).not_done:
        return False
    done.result()
    return True


def current_location() -> ActorLocation:
    """Return the location of the calling actor or task."""
    context = ray.get_runtime_context()
    gpu_ids = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", []))
    address = ray.util.get_node_ip_address()
    return ActorLocation(context.get_node_id(), address, gpu_ids, os.getpid())


@ray.remote
class ActorHost:
    """An actor that hosts one object, built on request."""

    def __init__(self) -> None:
        gc.disable()  # until `build`, whose imports create a million objects that are never freed
        self.hosted: Any = None

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
        value = await result if isinstance(result, Awaitable) else result
        note(method, begin)
        return value


class RayWorkerGroup:
    """Actors that are called together; results are in their order."""

    def __init__(
        self, options: Sequence[Any], name: str, lost: type[UserError],
        placement: PlacementGroup | None = None, deaths: tuple[type[Exception], ...] = (),
    ) -> None:  # fmt: skip
        """`options[i].remote()` creates actor i; `name` is what messages call an actor.

        `lost` is the error to raise when an actor is gone, `deaths` are further errors that mean
        that a hosted object is dead though its actor lives.
        """
        self.name, self.lost, self.deaths = name, lost, (*DEATHS, *deaths)
        self._options, self._placement = list(options), placement
        self.built: tuple[Any, ...] = ()
        """The arguments of `start_build`."""
        self.known_locations: list[ActorLocation] = []
        """Where each actor runs, once that was asked."""
        self.start()

    def start(self) -> None:
        """Start new actors and give them the driver's secrets before any other call."""
        self.hosts = [option.remote() for option in self._options]
        share_secrets(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    def locations(self) -> list[ActorLocation]:
        """Return where each actor runs."""
        if not self.known_locations:
            self.known_locations = self.run(current_location)
        return self.known_locations

    def run(
        self, function: Callable[..., Any], *args: Any, on: Sequence[int] | None = None
    ) -> list[Any]:
        """Call a function in the process of every actor, or of those numbered `on`."""
        hosts = self.hosts if on is None else [self.hosts[i] for i in on]
        return self.gather([host.run.remote(function, *args) for host in hosts])

    def start_build(self, factory: Callable[..., Any], args: Sequence[Sequence[Any]]) -> list[Any]:
        """Start building the hosted objects, with `args[i]` for actor i; returns Ray references."""
        self.built = factory, args
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
                raise_cause(self, error, actors, actors[call])
        check()
        return results

    def is_done(self, call: Any) -> bool:
        """Whether a call has finished or failed."""
        return bool(ray.wait([call], timeout=0)[0])

    def shutdown(self, method: str | None = None) -> None:
        """Kill the actors and release their resources.

        First call a `method` on every actor, for up to `SHUTDOWN_CALL_S`, whatever its outcome.
        """
        if method is not None:
            calls = [self.submit(i, method) for i in range(len(self))]
            ray.wait(calls, num_returns=len(calls), timeout=SHUTDOWN_CALL_S)
        for host in self.hosts:
            ray.kill(host)
        if self._placement is not None:
            release = partial(remove_placement_group, self._placement)
            if not bounded(release, RELEASE_S):
                logger.warning("Ray did not release the resources of %s", self.name)
