"""One engine with its agent: turns started trajectories into finished ones.

`RolloutReplica` is a plain class; a Ray actor hosts it in training, and tests use it directly.
Whoever loads new weights waits until nothing is sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from verl import plugins
from verl.agent.interface import Agent
from verl.config import Config
from verl.engine import RolloutEngine, Score
from verl.errors import PluginError, explain
from verl.remote_code import set_trust
from verl.rollout.interface import build_engine
from verl.training.devices import rollout_dtype
from verl.types import Sampling, Timeline, Trajectory


class RolloutReplica:
    """A rollout engine and the agent that uses it; `replica` is its number in the run."""

    def __init__(
        self, config: Config, agent_factory: Callable[[Config], Agent], replica: int
    ) -> None:
        """Build the agent and the engine; the model is loaded later, by `engine.start`."""
        set_trust(config.actor_rollout_ref.model.trust_remote_code)
        cores = plugins.optional("verl.ext.cpu.cores")
        if cores is not None:
            cores.prepare_engine(config)
        self.config = config
        self.agent = agent_factory(config)
        self.engine = build_engine(config, replica)
        self.replica = replica

    def dtype(self) -> str:
        """Return the dtype in which the engine computes and weights must be written."""
        return rollout_dtype(self.config)

    async def rollout(self, starts: Sequence[Trajectory], sampling: Sampling) -> list[Trajectory]:
        """Finish all `starts`, each in a task of its own; return them in order.

        A tool failure does not raise: the trajectory is FAILED. Raises PluginError if a
        user-defined agent fails or returns another trajectory.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.finish(start, sampling)) for start in starts]
        except ExceptionGroup as failures:
            raise failures.exceptions[0]  # noqa: B904 - it has a cause of its own
        return [task.result() for task in tasks]

    async def finish(self, start: Trajectory, sampling: Sampling) -> Trajectory:
        """Finish one trajectory; raises as `rollout`."""
        engine, key = self.turn_engine(start), start.key
        subject = f"agent.name={self.config.agent.name} at {start.prompt.uid}"
        expected = "the trajectory that it was given, with its group and sample, continued"
        with plugins.user_file_errors(subject, PluginError, expected):
            finished = await self.agent.run(start, engine, sampling)
        if not isinstance(finished, Trajectory):
            raise PluginError(explain(subject, type(finished).__name__, expected, "return it"))
        if finished.key != key:
            got = "group {!r}, sample {!r}".format(*finished.key)
            raise PluginError(explain(subject, got, expected, "keep them: dataclasses.replace"))
        finished.timeline = Timeline(self.replica)
        return finished

    def turn_engine(self, start: Trajectory) -> RolloutEngine:
        """Return the engine that a trajectory samples through."""
        return self.engine

    async def update_weights(
        self, source: str, version: int, scored_ids: Sequence[int] = ()
    ) -> Score | None:
        """Load new weights; nothing is sampled meanwhile.

        Returns the score of `scored_ids`, if there are any, before anything samples with the
        weights.
        """
        await self.engine.update_weights(source, version)
        return await self.score(scored_ids, version)

    async def score(self, ids: Sequence[int], version: int) -> Score | None:
        """Return the score of `ids` by the weights of `version`; None if there are no ids."""
        if not ids:
            return None
        log_probs = await self.engine.score(ids)
        return Score(self.replica, version, None if log_probs is None else tuple(log_probs))
