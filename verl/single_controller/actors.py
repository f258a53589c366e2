"""Groups of Ray actors: how they are called, how they go away, and what tells that one is gone.

An `ActorHost` is an empty Ray actor that first tells where it landed and later builds the object
it hosts, so that a group can learn its addresses and devices before any heavy work starts.

A rank that dies breaks the collective operation that its peers are in, and their errors may arrive
first: those say only that somebody is missing.
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
from verl.ports import free_port
from verl.single_controller.reaper import PART, OrphanReaper, sweep
from verl.training.network import secret_variables

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long an error waits for the news that it came of another actor's death."""
NODE_GRACE_S = 60.0
"""The same where a rank could not reach another: Ray needs as long to give up a node."""
POLL_S = 5.0
"""Between two looks at actors that are busy."""
KEPT_CALLS = 1000
"""Calls that an actor remembers, where nobody asks for them."""
LAST_CALL_S = 30.0
"""How long actors may take to end in good order before they are killed."""
DEATHS = (RayActorError, ActorUnschedulableError, NodeDiedError, ObjectLostError, OutOfMemoryError)
"""What a call raises when the process, or the node, that should have answered is gone."""
CAUSES = (
    (re.compile(r"memory monitor|low on memory|OutOfMemoryError", re.IGNORECASE),
     "killed, or its node was short of memory"),
    (re.compile(r"node (?:has )?died|node failure|NODE_DIED|node was terminated", re.IGNORECASE),
     "its node is lost"),
)  # fmt: skip
COLLECTIVE = re.compile(r"gloo|nccl|connection (?:closed|reset) by peer", re.IGNORECASE)
EXIT_DETAIL = re.compile(r"Worker exit detail: (.*?)(?:\.\s|\.?$)", re.DOTALL)
Answers = Callable[[], list[Any]]
"""Waits for the answers of calls that were begun, in the order of the actors."""


@dataclass(frozen=True)
class Place:
    """Where an actor runs."""

    node_id: str
    host: str
    gpu_ids: tuple[str, ...]
    pid: int = 0


class Call(NamedTuple):
    """One call of a hosted object, as its actor saw it; seconds since the epoch there."""

    method: str
    begin: float
    end: float


def here() -> Place:
    """Node, address and GPUs of the actor or task that asks."""
    context = ray.get_runtime_context()
    gpu_ids = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", []))
    return Place(context.get_node_id(), ray.util.get_node_ip_address(), gpu_ids, os.getpid())


@ray.remote
class ActorHost:
    """An actor that hosts one object, built on request."""

    def __init__(self) -> None:
        gc.disable()  # until it is built: what that imports makes a million objects, which stay
        self.hosted: Any = None
        self._calls: deque[Call] = deque(maxlen=KEPT_CALLS)
        self._reaper: OrphanReaper | None = None

    async def place(self) -> Place:
        """Node, address and GPUs of this actor."""
        return here()

    async def inherit(self, variables: Mapping[str, str]) -> None:
        """Take up variables of the driver's environment that Ray is not to log."""
        os.environ |= variables

    async def guard(self, mark: str) -> None:
        """Have the processes marked `mark` on this node end with this actor."""
        self._reaper = OrphanReaper(mark)

    async def clear(self) -> int:
        """Kill what is left here of the actor that this one replaces; returns how many."""
        return sweep(PART, os.environ[PART])

    async def free_port(self) -> int:
        """A port that is free on this actor's node now."""
        return free_port(host="")

    async def build(self, factory: Callable[..., Any], *args: Any) -> None:
        """Build the hosted object."""
        try:
            self.hosted = factory(*args)
        finally:
            gc.enable()

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method, plain or async, of the hosted object; `part.method` of a part of it."""
        begin = time.time()
        result = operator.attrgetter(method)(self.hosted)(*args)
        answer = await result if inspect.isawaitable(result) else result
        self._calls.append(Call(method, begin, time.time()))
        return answer

    async def take_calls(self) -> list[Call]:
        """What was called here since the last time, in order of ending; not the very oldest."""
        calls, self._calls = list(self._calls), deque(maxlen=KEPT_CALLS)
        return calls


@dataclass(frozen=True)
class Peer:
    """An actor as others see it: `await peer(method, *args)` calls what it hosts."""

    host: Any

    async def __call__(self, method: str, *args: Any) -> Any:
        return await self.host.call.remote(method, *args)


class RayWorkerGroup:
    """Actors that are called together; results come in the order of the actors.

    `options[i].remote()` makes actor i.
    """

    def __init__(
        self, options: Sequence[Any], name: str, lost: type[UserError],
        placement: PlacementGroup | None = None, deaths: tuple[type[Exception], ...] = (),
    ) -> None:  # fmt: skip
        """`name` is what users call one of the actors, `lost` the error when one is gone.

        `deaths` are errors of what the actors host that mean that it is gone, though they live.
        """
        self.name = name
        self._lost_error, self._deaths = lost, (*DEATHS, *deaths)
        self._options = list(options)
        self._placement = placement
        self._places: list[Place] = []
        self.hosts = self._start()

    def _start(self) -> list[Any]:
        """New actors, which have the driver's secrets before anything else is asked of them."""
        hosts, secrets = [option.remote() for option in self._options], secret_variables(os.environ)
        for host in hosts if secrets else ():
            host.inherit.remote(secrets)
        return hosts

    def __len__(self) -> int:
        return len(self.hosts)

    def places(self) -> list[Place]:
        """Where each actor runs."""
        if not self._places:
            self._places = self.gather([host.place.remote() for host in self.hosts])
        return self._places

    def free_port(self) -> int:
        """A port that is free where the first actor runs."""
        return int(ray.get(self.hosts[0].free_port.remote()))

    def start_build(self, factory: Callable[..., Any], args: Sequence[Sequence[Any]]) -> list[Any]:
        """Begin to build the hosted objects, `args[i]` for actor i; returns Ray references."""
        pairs = zip(self.hosts, args, strict=True)
        return [host.build.remote(factory, *arguments) for host, arguments in pairs]

    def submit(self, index: int, method: str, *args: Any) -> Any:
        """Begin a call on one actor; returns a Ray reference."""
        return self.hosts[index].call.remote(method, *args)

    def peer(self, index: int) -> Peer:
        """An actor, for the others to call."""
        return Peer(self.hosts[index])

    def share(self, value: Any) -> Any:
        """What `submit` may be given to several actors, and is written once."""
        return ray.put(value)

    def call(self, method: str, *args: Any) -> list[Any]:
        """The same call on every actor."""
        return self.begin(method, *args)()

    def scatter(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        """The call with `shards[i]` first on actor i."""
        return self.begin_scatter(method, shards, *args)()

    def begin(self, method: str, *args: Any) -> Answers:
        """Begin the same call on every actor."""
        calls = [self.submit(i, method, *args) for i in range(len(self))]
        return lambda: self.gather(calls)

    def begin_scatter(self, method: str, shards: Sequence[Any], *args: Any) -> Answers:
        """Begin the call with `shards[i]` first on actor i."""
        assert len(shards) == len(self), f"{len(shards)} shards for {len(self)} actors"
        calls = [self.submit(i, method, s, *args) for i, s in enumerate(shards)]
        return lambda: self.gather(calls)

    def gather(self, calls: Sequence[Any], check: Callable[[], None] = lambda: None) -> list[Any]:
        """The answers to `calls`, one call per actor, in their order.

        Returns as soon as one fails, for the others may wait for it for ever. Raises the group's
        error when an actor is gone; else what the hosted object raised. `check` is called every few
        seconds of waiting, and may raise too.
        """
        asked = {call: i for i, call in enumerate(calls)}
        answers: dict[Any, Any] = {}
        while len(answers) < len(asked):
            answers |= self.answers({c: i for c, i in asked.items() if c not in answers}, check)
        return [answers[call] for call in calls]

    def answers(
        self, asked: Mapping[Any, int], check: Callable[[], None] = lambda: None
    ) -> dict[Any, Any]:
        """What one of the calls, or more, gave; nothing where none does for a few seconds.

        `asked` says of which actor each is. Raises, and calls `check`, as `gather` does.
        """
        answers: dict[Any, Any] = {}
        done, _ = ray.wait(list(asked), num_returns=1, timeout=POLL_S)
        for call in done:
            try:
                answers[call] = ray.get(call)
            except RayError as error:
                self._raise(error, asked, asked[call])
        check()
        return answers

    def take_calls(self) -> list[list[Call]]:
        """What each actor was called for since the last time."""
        return self.gather([host.take_calls.remote() for host in self.hosts])

    def is_done(self, call: Any) -> bool:
        """Whether a call was answered, or failed."""
        return bool(ray.wait([call], timeout=0)[0])

    def cancel(self, calls: Sequence[Any]) -> None:
        """Stop what nobody waits for any more."""
        for call in calls:
            ray.cancel(call)

    def _raise(self, error: RayError, asked: Mapping[Any, int], index: int) -> NoReturn:
        """What an error of actor `index` comes of: the death of an actor, or the error itself."""
        # A `Peer` that was asked is gone, not the one that asked it.
        is_anothers = isinstance(error, RayTaskError) and isinstance(error.cause, DEATHS)
        if isinstance(error, self._deaths) and not is_anothers:
            raise self.lost(index, cause_of(error)) from error
        if isinstance(error, RayTaskError) and isinstance(error.cause, UserError):
            raise error.cause from None  # Ray's own text is the actor's traceback
        is_broken = broke_collective(error)
        dead = self._find_dead(asked, NODE_GRACE_S if is_broken else GRACE_S)
        if dead is not None:
            raise self.lost(*dead) from error
        if is_broken or is_anothers:
            raise self.lost(index, f"cut off from the others ({cause_of(error)})") from error
        raise error

    def _find_dead(self, asked: Mapping[Any, int], seconds: float) -> tuple[int, str] | None:
        """The first actor found to be gone, and why; None if each has answered or time is up."""
        asked = {**asked, **{host.place.remote(): i for i, host in enumerate(self.hosts)}}
        waiting, end = list(asked), time.monotonic() + seconds
        while waiting and time.monotonic() < end:
            done, waiting = ray.wait(waiting, timeout=max(0.0, end - time.monotonic()))
            for call in done:
                try:
                    ray.get(call)
                except DEATHS as error:
                    return asked[call], cause_of(error)
                except RayError:
                    continue  # it lives, and failed
        return None

    def lost(self, index: int, cause: str) -> UserError:
        """The error that says which actor is gone, where it was if that is known, and why."""
        where = ""
        if self._places:
            where = f" on node {self._places[index].host} (process {self._places[index].pid})"
        return self._lost_error(f"{self.name} {index}{where} is lost: {cause}")

    def restart(self) -> None:
        """Put an empty actor in the place of each, of which nothing is left then.

        Raises the group's error when there is no such place any more.
        """
        for host in self.hosts:
            ray.kill(host)
        self.hosts = self._start()
        self.gather([host.clear.remote() for host in self.hosts])
        self._places = []
        self.places()

    def last_call(self, method: str) -> None:
        """Ask every actor to end in good order; those that cannot are left to `shutdown`."""
        calls = [self.submit(i, method) for i in range(len(self))]
        ray.wait(calls, num_returns=len(calls), timeout=LAST_CALL_S)

    def shutdown(self) -> None:
        """End the actors and give their resources back."""
        for host in self.hosts:
            ray.kill(host)
        if self._placement is not None:
            remove_placement_group(self._placement)


def cause_of(error: BaseException) -> str:
    """Why the process is gone, in a few words."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[-1]}"
    text = str(error).strip()
    for pattern, words in CAUSES:
        if pattern.search(text):
            return words
    detail = EXIT_DETAIL.search(text)
    return detail.group(1) if detail else text.splitlines()[0] if text else type(error).__name__


def broke_collective(error: BaseException) -> bool:
    """Whether a rank failed because it could not talk to another."""
    if not isinstance(error, RayTaskError):
        return False
    cause = error.cause
    # torch's by its name: an actor that hosts nothing yet starts without torch.
    is_torchs = any(kind.__name__ == "DistError" for kind in type(cause).__mro__)
    return is_torchs or (isinstance(cause, RuntimeError) and bool(COLLECTIVE.search(str(cause))))


@dataclass
class Restarts:
    """What was spent of `trainer.max_restarts` since the command began."""

    allowed: int
    of_replicas: int = 0
    of_run: int = 0

    def spend_on_replicas(self, error: UserError) -> None:
        """Count a restart of the engines; raises the error where no more are allowed."""
        self._spend(error, "all engines start again and repeat what they were asked")
        self.of_replicas += 1

    def spend_on_run(self, error: UserError, start: str) -> None:
        """Count a restart of everything from `start`; raises the error as above."""
        self._spend(error, f"the run starts again from {start}")
        self.of_run += 1

    def metrics(self) -> dict[str, float]:
        """The counts so far."""
        counts = {"replica_restarts": self.of_replicas, "run_restarts": self.of_run}
        return {f"fault/{name}": float(count) for name, count in counts.items()}

    def _spend(self, error: UserError, what_follows: str) -> None:
        spent = self.of_replicas + self.of_run
        if spent >= self.allowed:
            raise type(error)(
                f"{error}; the run ends, after {spent} of trainer.max_restarts={self.allowed} "
                "restarts: find out why, then go on with trainer.resume_mode=auto"
            ) from error
        count = f"restart {spent + 1} of trainer.max_restarts={self.allowed}"
        logger.warning("%s; %s (%s)", error, what_follows, count)
