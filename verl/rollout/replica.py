"""One engine with its agent: turns started trajectories into finished ones.

`RolloutReplica` is a plain class; a Ray actor hosts it in training, and tests use it directly. Each
trajectory samples through a `TurnEngine`, which times its turns and holds the weights fixed while a
turn is sampled.

New weights are loaded between turns, or between trajectories.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any

from verl import plugins
from verl.agent.interface import Agent
from verl.config import Config
from verl.engine import Listener, RolloutEngine, Score
from verl.errors import PluginError, explain
from verl.remote_code import set_trust
from verl.rollout.interface import build_engine
from verl.rollout.pool import trajectory_keys
from verl.rollout.schedule import Schedule, TurnKey, load_schedule
from verl.training.devices import device_type, pin_to_cores, rollout_dtype
from verl.types import Completion, EngineCounts, Sampling, Trajectory, TrajectoryKey, TurnTimes

logger = logging.getLogger(__name__)


class RolloutReplica:
    """A rollout engine and the agent that uses it; `replica` is its number in the run."""

    def __init__(
        self, config: Config, agent_factory: Callable[[Config], Agent], replica: int
    ) -> None:
        """Build the agent and the engine; the model is loaded later, by `engine.start`."""
        set_trust(config.actor_rollout_ref.model.trust_remote_code)
        if config.placement.is_split and device_type(config.trainer.device) == "cpu":
            pin_to_cores(config.trainer.rollout_gpus, is_engine=True)
        self.config = config
        self.agent = agent_factory(config)
        self.engine = build_engine(config, replica)
        self.replica = replica
        self.clock = BusyClock()
        self._finished: dict[TrajectoryKey, Trajectory] = {}
        """Finished trajectories of calls that have not returned yet."""
        self.gate = WeightGate(load_schedule(config.actor_rollout_ref.rollout.replay))
        self._pause = contextlib.AsyncExitStack()

    def dtype(self) -> str:
        """Return the dtype in which the engine computes and weights must be written."""
        return rollout_dtype(self.config)

    async def rollout(
        self, starts: Sequence[Trajectory], sampling: Sampling, version: int = 0
    ) -> list[Trajectory]:
        """Finish all `starts`; return them in order.

        Every token is sampled from weights of `version` or later; with `rollout.partial` a
        trajectory may contain several versions. A tool failure does not raise: the trajectory is
        FAILED. Raises PluginError if a user-defined agent fails or returns another trajectory.
        """
        rollout, keys = self.config.actor_rollout_ref.rollout, trajectory_keys(starts)
        self.gate.register(keys)
        try:
            if rollout.partial or rollout.replay is not None:
                return await self._finish_all(starts, sampling, version, self.gate)
            async with self.gate.sampling(version):
                return await self._finish_all(starts, sampling, version, None)
        finally:
            for key in keys:
                self._finished.pop(key, None)

    def finished(self) -> dict[TrajectoryKey, Trajectory]:
        """Return the finished trajectories of calls that have not returned yet."""
        return dict(self._finished)

    def busy_share(self) -> float:
        """Return the share of time since the last call in which any request was running."""
        return self.clock.take_share()

    async def update_weights(
        self, folder: str, version: int, is_adapter: bool = False, num_calls: int = 0,
        scored_ids: Sequence[int] = (),
    ) -> Score | None:  # fmt: skip
        """Load new weights once running turns or trajectories have finished.

        `num_calls` is the number of calls of `rollout` that were made before this one. Returns the
        score of `scored_ids`, if there are any, before anything samples with the weights.
        """
        async with self.gate.changing(version, num_calls):
            # Ray may start calls out of order, so newer weights may be loaded already.
            if version > self.gate.version:
                await self.engine.update_weights(folder, version, is_adapter)
            return await self._score(scored_ids, max(version, self.gate.version))

    async def pause(self, version: int, num_calls: int = 0) -> None:
        """Stop sampling until `receive_weights` has finished; return once nothing is sampled."""
        await self._pause.enter_async_context(self.gate.changing(version, num_calls))

    async def receive_weights(
        self, stream: str, version: int, scored_ids: Sequence[int] = ()
    ) -> Score | None:
        """After `pause`, load the weights that the ranks send; returns as `update_weights`."""
        async with self._pause:
            await self.engine.receive_weights(stream, version)
            return await self._score(scored_ids, version)

    async def _score(self, ids: Sequence[int], version: int) -> Score | None:
        if not ids:
            return None
        log_probs = await self.engine.score(ids)
        return Score(self.replica, version, None if log_probs is None else tuple(log_probs))

    async def _finish_all(
        self, starts: Sequence[Trajectory], sampling: Sampling, version: int,
        gate: WeightGate | None,
    ) -> list[Trajectory]:  # fmt: skip
        """Finish each of `starts` in a task of its own."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._finish(start, sampling, version, gate))
                    for start in starts
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0]  # noqa: B904 - it has a cause of its own
        return [task.result() for task in tasks]

    async def _finish(
        self, start: Trajectory, sampling: Sampling, version: int, gate: WeightGate | None
    ) -> Trajectory:
        key = (start.group, start.sample)
        engine = TurnEngine(self.engine, self.clock, gate, version, key)
        subject = f"agent.name={self.config.agent.name} at {start.prompt.uid}"
        expected = "the trajectory that it was given, with its group and sample, continued"
        try:
            with plugins.user_file_errors(subject, PluginError, expected):
                finished = await self.agent.run(start, engine, sampling)
        finally:
            self.gate.finish(key)
        if not isinstance(finished, Trajectory):
            raise PluginError(explain(subject, type(finished).__name__, expected, "return it"))
        if (finished.group, finished.sample) != (start.group, start.sample):
            got = f"group {finished.group!r}, sample {finished.sample!r}"
            raise PluginError(explain(subject, got, expected, "keep them: dataclasses.replace"))
        finished.replica, finished.turn_times = self.replica, engine.times
        self._finished[key] = finished
        return finished


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


class BusyClock:
    """Measures the share of time in which a replica samples."""

    def __init__(self) -> None:
        self._num_running, self._busy = 0, 0.0
        self._since = self._taken = time.perf_counter()

    def change(self, by: int) -> None:
        """Add `by` (+1 or -1) to the number of running turns."""
        now = time.perf_counter()
        self._busy += now - self._since if self._num_running else 0.0
        self._num_running, self._since = self._num_running + by, now

    def take_share(self) -> float:
        """Return the busy share since the last call, or since the clock was created."""
        self.change(0)
        elapsed, self._taken = self._since - self._taken, self._since
        busy, self._busy = self._busy, 0.0
        return busy / max(elapsed, 1e-9)


class TurnEngine(RolloutEngine):
    """The engine of one trajectory; without a gate, the caller keeps the weights fixed."""

    def __init__(
        self, engine: RolloutEngine, clock: BusyClock, gate: WeightGate | None, min_version: int,
        key: TrajectoryKey = ("", 0),
    ) -> None:  # fmt: skip
        """A schedule finds turns by `key`."""
        self._engine, self._clock = engine, clock
        self._gate, self._min_version, self._key = gate, min_version, key
        self._num_turns = 0
        self.times: list[TurnTimes] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        return await self._turn(self._engine.generate(prompt_ids, sampling))

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener
    ) -> Completion:
        return await self._turn(self._engine.stream(prompt_ids, sampling, listener))

    async def _turn(self, request: Coroutine[Any, Any, Completion]) -> Completion:
        """Sample one turn with fixed weights; record its times, also if it fails."""
        requested, number, gate = time.time(), self._num_turns, self._gate
        self._num_turns += 1
        queued_s, counts = 0.0, EngineCounts()
        try:
            held = gate.sampling(self._min_version, (*self._key, number)) if gate else None
            async with held or contextlib.nullcontext():
                started = time.time()
                self._clock.change(+1)
                try:
                    completion = await request
                    queued_s, counts = completion.queued_s, completion.counts
                    return completion
                finally:
                    self._clock.change(-1)
                    times = TurnTimes(requested, started, time.time(), number, queued_s, counts)
                    self.times.append(times)
        finally:
            request.close()  # it may never have started
