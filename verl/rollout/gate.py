"""When a replica takes up new weights: at once, between turns, or between trajectories."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from verl.rollout.schedule import Part, Schedule
from verl.types import Name

logger = logging.getLogger(__name__)


class WeightGate:
    """Holds back what is about to sample while weights change, and the change while any samples.

    Of one event loop. A change that waits goes before whatever comes after it, so that it is
    delayed by what was sampling when it came and by nothing else. With a schedule it also waits for
    the turns that older weights are to sample, which go before it, and turns for their weights.
    Of trajectories that were asked for, since of others no turn may ever come.
    """

    def __init__(
        self,
        schedule: Schedule | None = None,
        interrupt: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`interrupt` ends what samples, for a change that does not wait; a schedule says itself
        where turns end."""
        self._schedule = schedule
        self._interrupt = None if schedule else interrupt
        self.version = 0
        """Of the weights that are sampled from."""
        self._num_sampling = self._num_calls = 0
        self._is_changing = self._is_loading = False
        self._changes = asyncio.Lock()
        self._changed, self._drained = asyncio.Event(), asyncio.Event()

    def begin(self, names: Iterable[Name]) -> None:
        """A call for these trajectories has come."""
        self._num_calls += 1
        if self._schedule is not None:
            for name in names:
                self._schedule.begin(name)
        self._drained.set()

    def end(self, name: Name) -> None:
        """That trajectory has ended."""
        if self._schedule is not None:
            self._schedule.end(name)
        self._drained.set()

    @contextlib.asynccontextmanager
    async def sampling(
        self, at_least: int = 0, part: Part | None = None
    ) -> AsyncIterator[int | None]:
        """Sample in the body, from weights of version `at_least` or later, which stay the same.

        A `part` of a turn that is in the schedule is sampled by the weights that it has there, or
        where those are gone, as after a resume, by those that there are; the body gets the number
        of the turn's tokens where it ends, if it is cut there.
        """
        planned, until = None, None
        if self._schedule is not None and part is not None:
            planned, until = self._schedule.version(part), self._schedule.until(part)
        while self._is_too_early(at_least, planned):
            await self._changed.wait()
        if planned is not None and planned < self.version:
            logger.warning("%s was sampled by version %d, which is gone: it is another run from "
                           "here on", part, planned)  # fmt: skip
        self._num_sampling += 1
        try:
            yield until
        finally:
            self._num_sampling -= 1
            if self._schedule is not None and part is not None:
                self._schedule.done(part)
            if not self._num_sampling:
                self._drained.set()

    def _is_too_early(self, at_least: int, planned: int | None) -> bool:
        if self._is_loading:
            return True
        if planned is not None:
            return self.version < planned
        return self._is_changing or self.version < at_least

    @contextlib.asynccontextmanager
    async def changing(self, version: int, num_calls: int = 0) -> AsyncIterator[None]:
        """Change the weights to those of `version` in the body, in which nothing samples.

        So many calls for trajectories were made before; with a schedule they come first.
        """
        async with self._changes:
            self._is_changing = True
            try:
                if self._interrupt and self._num_sampling and version > self.version:
                    await self._interrupt()
                while self._num_sampling or self._is_awaited(version, num_calls):
                    self._drained.clear()
                    await self._drained.wait()
                self._is_loading = True
                yield
                self.version = max(version, self.version)
            finally:
                self._is_changing = self._is_loading = False
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()

    def _is_awaited(self, version: int, num_calls: int) -> bool:
        """Whether older weights are still to sample what the schedule says."""
        if self._schedule is None:
            return False
        return self._num_calls < num_calls or not self._schedule.is_over_before(version)
