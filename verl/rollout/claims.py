"""Which trajectories of a request a replica finishes: its own, or what it claims when it has room.

All replicas are given the whole request. Each takes the next group that nobody has taken, as often
as it has room, so that a replica whose dialogues are short does not wait for another's long ones.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

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
