"""Keeps a replica's weights fixed while it samples, and repeats a recorded schedule of versions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable

from verl.rollout.schedule import Schedule, TurnKey
from verl.types import TrajectoryKey

logger = logging.getLogger(__name__)


class WeightGate:
    """Keeps the weights fixed while anything samples, and blocks sampling while they change.

    For use in one event loop. A waiting change takes precedence over sampling that is requested
    later, so it is delayed only by what is sampling when it arrives. With a schedule, a change also
    waits for the scheduled turns of older weights, which take precedence over it, and turns wait
    for the weights that the schedule names. Only turns of registered trajectories are waited for:
    turns of other trajectories may never come.
    """

    def __init__(self, schedule: Schedule | None = None) -> None:
        self._schedule = schedule
        self.version = 0
        """Version of the loaded weights."""
        self._num_sampling = self._num_calls = 0
        self._is_changing = self._is_loading = False  # changing also while a change still waits
        self._changes = asyncio.Lock()
        self._changed = asyncio.Event()
        """Set after a change, and replaced by a new event."""
        self._progressed = asyncio.Event()
        """Set whenever a waiting change may have become possible."""

    def register(self, keys: Iterable[TrajectoryKey]) -> None:
        """Register a call of `rollout` with the trajectories assigned to this replica."""
        self._num_calls += 1
        if self._schedule is not None:
            for key in keys:
                self._schedule.start(key)
        self._progressed.set()

    def finish(self, key: TrajectoryKey) -> None:
        """Note that a trajectory has finished: no more of its turns will come."""
        if self._schedule is not None:
            self._schedule.finish(key)
        self._progressed.set()

    @contextlib.asynccontextmanager
    async def sampling(
        self, min_version: int = 0, turn: TurnKey | None = None
    ) -> AsyncIterator[None]:
        """Keep the weights fixed in the body, at version `min_version` or later.

        If the schedule contains `turn`, wait for the weights that it names, or use the current ones
        if those are gone, as after a resume.
        """
        planned = None
        if self._schedule is not None and turn is not None:
            planned = self._schedule.version(turn)
        while self._must_wait(min_version, planned):
            await self._changed.wait()
        if planned is not None and planned < self.version:
            logger.warning("%s was sampled by version %d, which is gone: from here on the run "
                           "differs from the recorded one", turn, planned)  # fmt: skip
        self._num_sampling += 1
        try:
            yield
        finally:
            self._num_sampling -= 1
            if self._schedule is not None and turn is not None:
                self._schedule.mark_done(turn)
            if not self._num_sampling:
                self._progressed.set()

    def _must_wait(self, min_version: int, planned: int | None) -> bool:
        if self._is_loading:
            return True
        if planned is not None:
            return self.version < planned
        return self._is_changing or self.version < min_version

    @contextlib.asynccontextmanager
    async def changing(self, version: int, num_calls: int = 0) -> AsyncIterator[None]:
        """Change the weights to `version` in the body, during which nothing samples.

        With a schedule, first wait until `num_calls` calls of `rollout` have been registered.
        """
        async with self._changes:
            self._is_changing = True
            try:
                while self._num_sampling or self._has_scheduled_turns(version, num_calls):
                    self._progressed.clear()
                    await self._progressed.wait()
                self._is_loading = True
                yield
                self.version = max(version, self.version)
            finally:
                self._is_changing = self._is_loading = False
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()

    def _has_scheduled_turns(self, version: int, num_calls: int) -> bool:
        """Whether the schedule has turns left for weights older than `version`."""
        if self._schedule is None:
            return False
        return self._num_calls < num_calls or not self._schedule.is_done_before(version)
