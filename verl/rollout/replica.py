"""One engine with its agent: turns started trajectories into finished ones.

`RolloutReplica` is a plain class; a Ray actor hosts it in training, and tests use it directly. Each
trajectory samples through a `TurnEngine`, which times its turns and holds the weights fixed while a
turn is sampled.

New weights are loaded between turns, or between trajectories.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from verl import plugins
from verl.agent.interface import Agent
from verl.config import Config
from verl.engine import Score
from verl.errors import PluginError, explain
from verl.remote_code import set_trust
from verl.rollout.gate import WeightGate
from verl.rollout.interface import build_engine
from verl.rollout.pool import trajectory_keys
from verl.rollout.schedule import load_schedule
from verl.rollout.turns import BusyClock, TurnEngine
from verl.training.devices import device_type, pin_to_cores, rollout_dtype
from verl.types import Sampling, Trajectory, TrajectoryKey


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
        self._paused: dict[int, contextlib.AsyncExitStack] = {}
        """What ends the pause before each version that is about to be loaded."""

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
        self, source: str, version: int, num_calls: int = 0, scored_ids: Sequence[int] = ()
    ) -> Score | None:
        """Load new weights once running turns or trajectories have finished.

        `num_calls` is the number of calls of `rollout` that were made before this one. Returns the
        score of `scored_ids`, if there are any, before anything samples with the weights.
        """
        if version not in self._paused:
            await self.pause(version, num_calls)
        async with self._paused.pop(version):
            # Ray may start calls out of order, so newer weights may be loaded already.
            if version > self.gate.version:
                await self.engine.update_weights(source, version)
            return await self._score(scored_ids, max(version, self.gate.version))

    async def pause(self, version: int, num_calls: int = 0) -> None:
        """Return once nothing samples; `update_weights` of `version` ends the pause."""
        paused = contextlib.AsyncExitStack()
        await paused.enter_async_context(self.gate.changing(version, num_calls))
        self._paused[version] = paused

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
