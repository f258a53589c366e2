"""Trajectories on their way: who finishes them, and which replica finishes which of them.

All replicas are given a whole request. Each claims the next group that nobody has taken, as often
as it has room, so that a replica whose dialogues are short does not wait for another's long ones.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.types import Name, Sampling, Trajectory


@dataclass(eq=False)
class InFlight:
    """Started trajectories that engines are finishing."""

    starts: Sequence[Trajectory]
    sampling: Sampling
    finished: dict[int, Trajectory] = field(default_factory=dict)
    """By position in `starts`."""
    calls: dict[Any, int] = field(default_factory=dict)
    """The replica of each call that is not answered yet."""

    @property
    def left(self) -> list[int]:
        """Positions of those that are not finished."""
        return [i for i in range(len(self.starts)) if i not in self.finished]

    @property
    def names(self) -> list[Name]:
        """Of each start."""
        return names_of(self.starts, self.sampling)

    def in_order(self) -> list[Trajectory]:
        """All of them, finished, in the order of `starts`."""
        return [self.finished[i] for i in range(len(self.starts))]


def names_of(starts: Sequence[Trajectory], sampling: Sampling) -> list[Name]:
    """What the trajectories of one request are known by."""
    return [(start.group, start.sample, sampling.temperature == 0) for start in starts]


class Engines:
    """Whatever finishes trajectories; this one does it when they are taken."""

    def start(
        self, starts: Sequence[Trajectory], sampling: Sampling,
        finished: Mapping[int, Trajectory] | None = None,
    ) -> InFlight:  # fmt: skip
        """Begin to finish `starts`, and return at once; some, by position, may be `finished`."""
        return InFlight(starts, sampling, dict(finished or {}))

    def finish(self, flight: InFlight) -> list[Trajectory]:
        """Wait until all are finished; they come in the order of their starts."""
        left = flight.left
        new = self.generate([flight.starts[i] for i in left], flight.sampling)
        flight.finished.update(zip(left, new, strict=True))
        return flight.in_order()

    def generate(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        """Finish `starts`, in their order."""
        return self.finish(self.start(starts, sampling))

    def unanswered(self) -> Callable[[], Mapping[Name, Trajectory]]:
        """Ask for what is finished of flights that are not; the function waits for the answer, also
        in another thread."""
        return dict

    def abandon(self, flight: InFlight) -> None:
        """Nobody waits for these any more."""

    def busy_share(self) -> float | None:
        """The share of the time since the last call in which an engine sampled, where known."""
        return None

    def sleep(self) -> None:
        """Give the devices' memory to the training ranks."""


Ask = Callable[[str, int, int], Awaitable[int]]
"""Calls `claim(request, number)` of the replica that counts what is taken."""


@dataclass(frozen=True)
class Claims:
    """What one replica may finish of a request: `groups` of positions, each begun as a whole."""

    groups: Sequence[Sequence[int]]
    most: float = math.inf
    """Of a request's trajectories, how many a replica begins before some have ended: its share."""
    request: int = 0
    ask: Ask | None = None
    """None where all `groups` are this replica's own."""

    @property
    def own(self) -> list[int]:
        """What no other replica may take."""
        return [] if self.ask else [i for group in self.groups for i in group]

    async def take(
        self, room: Room, num_begun: Callable[[], int], begin: Callable[[Sequence[int]], None]
    ) -> None:
        """Have positions begun until all are taken: as many as there is `room` for, which is waited
        for, but one group at least. `num_begun` are those that have not ended.

        An earlier request goes first, unless it has begun its share.
        """
        if self.ask is None:
            begin(self.own)
            return
        largest = max(map(len, self.groups), default=1)
        first = 0
        room.open[self.request] = lambda: num_begun() < self.most
        try:
            while first < len(self.groups):
                while room.left <= 0 or room.next_request() != self.request:
                    await room.changed()
                number = max(1, int(min(room.left, self.most - num_begun()) // largest))
                first = await self.ask("claim", self.request, number)
                begin([i for group in self.groups[first : first + number] for i in group])
                await asyncio.sleep(0)  # until each has begun, and taken its room
        finally:
            del room.open[self.request]
            room.change(0)


class Room:
    """How much of a replica is taken: by turns, and by trajectories that are yet to begin one.

    One that waits for a tool takes none, so that engines have enough to do however slow tools are.
    """

    def __init__(self, size: float = math.inf) -> None:
        self.left = size
        """Trajectories that may begin; below 0 where tools have answered meanwhile."""
        self.open: dict[int, Callable[[], bool]] = {}
        """Requests of which some may be left to take: whether it has not begun its share."""
        self._changed = asyncio.Event()

    def change(self, by: int) -> None:
        """So many more may begin; wakes who waits, also by 0."""
        self.left += by
        self._changed.set()

    def next_request(self) -> int | None:
        """The earliest that may begin more."""
        return min((request for request, wants in self.open.items() if wants()), default=None)

    async def changed(self) -> None:
        """Wait until something ends."""
        self._changed.clear()
        await self._changed.wait()


class NoEngines(Engines):
    """Takes no weights, and counts their versions all the same: those of the record are held
    against them. It is asked for no trajectory."""

    def __init__(self, dtype: str) -> None:
        """`dtype`: the format in which the trained policy is written."""
        self.version, self.dtype = 0, dtype

    def update_weights(self, policy: object) -> dict[str, float]:
        """Nobody waits for them."""
        self.version += 1
        return {}

    def wake_up(self) -> None:
        """Nothing sleeps."""

    def shutdown(self) -> None:
        """Nothing runs."""
