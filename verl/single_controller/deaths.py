"""How a dead actor is noticed, and how its death is described.

A rank that dies breaks the collective operation its peers are in, and their errors may arrive
before Ray reports the death. They do not say which rank is missing.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

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

from verl.errors import UserError

if TYPE_CHECKING:
    from verl.single_controller.actors import RayWorkerGroup

DEATH_NOTICE_S = 10.0
"""Seconds to wait, after an actor's error, for Ray to report another actor's death as its cause."""
NODE_DEATH_NOTICE_S = 60.0
"""The same where a rank could not reach another: Ray takes that long to declare a node dead."""
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


def raise_cause(
    group: RayWorkerGroup, error: RayError, actors: Mapping[Any, int], index: int
) -> NoReturn:
    """Raise the group's error if a death caused the error of actor `index`, else that error.

    `actors` maps each pending call to the index of its actor.
    """
    if isinstance(error, group.deaths):
        raise lost_error(group, index, cause_of(error)) from error
    if isinstance(error, RayTaskError) and isinstance(error.cause, UserError):
        raise error.cause from None  # Ray's own text is the actor's traceback
    is_collective = broke_collective(error)
    dead = find_dead(group, actors, NODE_DEATH_NOTICE_S if is_collective else DEATH_NOTICE_S)
    if dead is not None:
        raise lost_error(group, *dead) from error
    if is_collective:
        raise lost_error(group, index, f"cut off from the others ({cause_of(error)})") from error
    raise error


def find_dead(
    group: RayWorkerGroup, actors: Mapping[Any, int], seconds: float
) -> tuple[int, str] | None:
    """Return the first dead actor and the cause; None if all respond or the time is up."""
    hosts = enumerate(group.hosts)
    actors = {**actors, **{host.run.remote(os.getpid): i for i, host in hosts}}
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


def lost_error(group: RayWorkerGroup, index: int, cause: str) -> UserError:
    """Return the error for a lost actor, with its node and process if known."""
    location = group.known_locations[index] if group.known_locations else None
    where = f" on node {location.host} (process {location.pid})" if location else ""
    return group.lost(f"{group.name} {index}{where} is lost: {cause}")


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
