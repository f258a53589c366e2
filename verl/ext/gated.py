"""Replicas whose weights change while they sample: between turns, or between trajectories.

Only runs with `rollout.max_staleness` or `rollout.replay` have them. In other runs the trainer
waits until nothing is sampled before it sends new weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace

from verl.agent.interface import Agent
from verl.config import Config
from verl.engine import Listener, RolloutEngine, Score
from verl.ext.turn_times import BusyClock, TimedEngine, TimedReplica
from verl.types import Completion, Sampling, Trajectory, TrajectoryKey

TurnKey = tuple[str, int, int]
"""A turn: the trajectory's key, and the number of the turn in the dialogue."""


class WeightGate:
    """Keeps the weights fixed while anything samples, and blocks sampling while they change.

    For use in one event loop. A waiting change takes precedence over sampling that is requested
    later, so it is delayed only by what is sampling when it arrives. A subclass may delay turns
    and changes further: it is told which trajectories run on this replica, and which turn waits.
    """

    def __init__(self) -> None:
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
        self._progressed.set()

    def finish(self, key: TrajectoryKey) -> None:
        """Note that a trajectory has finished: no more of its turns will come."""
        self._progressed.set()

    @contextlib.asynccontextmanager
    async def sampling(
        self, min_version: int = 0, turn: TurnKey | None = None
    ) -> AsyncIterator[None]:
        """Keep the weights fixed in the body, at version `min_version` or later.

        `turn` is what samples, unless it is all of a request.
        """
        while self.must_wait(min_version, turn):
            await self._changed.wait()
        self._num_sampling += 1
        try:
            yield
        finally:
            self._num_sampling -= 1
            if not self._num_sampling:
                self._progressed.set()

    def must_wait(self, min_version: int, turn: TurnKey | None) -> bool:
        """Whether what is to sample has to wait for a change of the weights."""
        return self._is_changing or self.version < min_version

    @contextlib.asynccontextmanager
    async def changing(self, version: int, num_calls: int = 0) -> AsyncIterator[None]:
        """Change the weights to `version` in the body, during which nothing samples.

        `num_calls` is the number of calls of `rollout` that were made before this one.
        """
        async with self._changes:
            self._is_changing = True
            try:
                while self._num_sampling or self.must_wait_for_turns(version, num_calls):
                    self._progressed.clear()
                    await self._progressed.wait()
                self._is_loading = True
                yield
                self.version = max(version, self.version)
            finally:
                self._is_changing = self._is_loading = False
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()

    def must_wait_for_turns(self, version: int, num_calls: int) -> bool:
        """Whether a change has to wait for turns that do not sample yet."""
        return False


class GatedEngine(TimedEngine):
    """The engine of one trajectory, which holds the weights fixed during each turn."""

    def __init__(
        self, engine: RolloutEngine, clock: BusyClock, gate: WeightGate, min_version: int,
        key: TrajectoryKey = ("", 0),
    ) -> None:  # fmt: skip
        super().__init__(engine, clock)
        self._gate, self._min_version, self._key = gate, min_version, key
        self._num_requested = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        async with self._fixed_weights():
            return await super().generate(prompt_ids, sampling)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener
    ) -> Completion:
        async with self._fixed_weights():
            return await super().stream(prompt_ids, sampling, listener)

    @contextlib.asynccontextmanager
    async def _fixed_weights(self) -> AsyncIterator[None]:
        """Wait for the turn's weights; its times then tell how long."""
        requested, number = time.time(), self._num_requested
        self._num_requested += 1
        async with self._gate.sampling(self._min_version, (*self._key, number)):
            try:
                yield
            finally:
                self.times[-1] = replace(self.times[-1], requested=requested, turn=number)


class GatedReplica(TimedReplica):
    """A replica that samples and gets new weights at the same time.

    With `rollout.partial`, a trajectory may contain several versions.
    """

    def __init__(
        self, config: Config, agent_factory: Callable[[Config], Agent], replica: int
    ) -> None:
        super().__init__(config, agent_factory, replica)
        self.gate = self.build_gate()
        self._min_versions: dict[TrajectoryKey, int] = {}
        """The oldest version with which each running trajectory may be sampled."""
        self._finished: dict[TrajectoryKey, Trajectory] = {}
        """Finished trajectories of calls that have not returned yet."""
        self._paused: dict[int, contextlib.AsyncExitStack] = {}
        """What ends the pause before each version that is about to be loaded."""

    def build_gate(self) -> WeightGate:
        """Build the gate of the replica."""
        return WeightGate()

    @property
    def changes_between_turns(self) -> bool:
        """Whether weights may change within a trajectory."""
        return self.config.actor_rollout_ref.rollout.partial

    async def rollout(
        self, starts: Sequence[Trajectory], sampling: Sampling, version: int = 0
    ) -> list[Trajectory]:
        """As the base class; every token is sampled from weights of `version` or later."""
        keys = [start.key for start in starts]
        self.gate.register(keys)
        self._min_versions |= dict.fromkeys(keys, version)
        try:
            if self.changes_between_turns:
                return await super().rollout(starts, sampling)
            async with self.gate.sampling(version):
                return await super().rollout(starts, sampling)
        finally:
            for key in keys:
                self._min_versions.pop(key, None)
                self._finished.pop(key, None)

    async def finish(self, start: Trajectory, sampling: Sampling) -> Trajectory:
        key = start.key
        try:
            self._finished[key] = await super().finish(start, sampling)
        finally:
            self.gate.finish(key)
        return self._finished[key]

    def timed_engine(self, start: Trajectory) -> TimedEngine:
        if not self.changes_between_turns:
            return super().timed_engine(start)
        key = start.key
        return GatedEngine(self.engine, self.clock, self.gate, self._min_versions[key], key)

    def finished(self) -> dict[TrajectoryKey, Trajectory]:
        """Return the finished trajectories of calls that have not returned yet."""
        return dict(self._finished)

    async def update_weights(
        self, source: str, version: int, scored_ids: Sequence[int] = (), num_calls: int = 0
    ) -> Score | None:
        """Load new weights once running turns or trajectories have finished.

        `num_calls` is the number of calls of `rollout` that were made before this one.
        """
        if version not in self._paused:
            await self.pause(version, num_calls)
        async with self._paused.pop(version):
            # Ray may start calls out of order, so newer weights may be loaded already.
            if version > self.gate.version:
                await self.engine.update_weights(source, version)
            return await self.score(scored_ids, max(version, self.gate.version))

    async def pause(self, version: int, num_calls: int = 0) -> None:
        """Return once nothing samples; `update_weights` of `version` ends the pause."""
        paused = contextlib.AsyncExitStack()
        await paused.enter_async_context(self.gate.changing(version, num_calls))
        self._paused[version] = paused


def replica_class(config: Config) -> type[GatedReplica] | None:
    """Return what hosts an engine whose weights change while it samples."""
    return GatedReplica if config.actor_rollout_ref.rollout.max_staleness > 0 else None
