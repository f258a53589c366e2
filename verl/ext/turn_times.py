"""The times of turns: what a trajectory waits for, and how busy engines are.

Each replica gives a trajectory an engine that times its turns; metrics are computed on the driver.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from verl.agent.interface import Agent
from verl.config import Config
from verl.engine import Listener, RolloutEngine
from verl.rollout.replica import RolloutReplica
from verl.trainer.hooks import Hook
from verl.types import (
    Completion,
    Measured,
    Metrics,
    Sampling,
    Trajectory,
    TrajectoryKey,
    TurnTimes,
)

if TYPE_CHECKING:
    from verl.trainer.build import Parts
    from verl.trainer.loop import RayPPOTrainer


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


class TimedEngine(RolloutEngine):
    """The engine of one trajectory, which times its turns."""

    def __init__(self, engine: RolloutEngine, clock: BusyClock) -> None:
        self._engine, self._clock = engine, clock
        self._num_turns = 0
        self.times: list[TurnTimes] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        with self._turn() as completions:
            completions.append(await self._engine.generate(prompt_ids, sampling))
        return completions[0]

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener
    ) -> Completion:
        with self._turn() as completions:
            completions.append(await self._engine.stream(prompt_ids, sampling, listener))
        return completions[0]

    @contextlib.contextmanager
    def _turn(self) -> Iterator[list[Completion]]:
        """Time a turn, also if it fails; the body adds its completion to the list."""
        started, number, completions = time.time(), self._num_turns, list[Completion]()
        self._num_turns += 1
        self._clock.change(+1)
        try:
            yield completions
        finally:
            self._clock.change(-1)
            measured = sum((completion.measured for completion in completions), Measured())
            self.times.append(TurnTimes(started, started, time.time(), number, measured))


class TimedReplica(RolloutReplica):
    """A replica that times the turns of its trajectories."""

    def __init__(
        self, config: Config, agent_factory: Callable[[Config], Agent], replica: int
    ) -> None:
        super().__init__(config, agent_factory, replica)
        self.clock = BusyClock()
        self._times: dict[TrajectoryKey, list[TurnTimes]] = {}
        """The turns of each running trajectory."""

    async def finish(self, start: Trajectory, sampling: Sampling) -> Trajectory:
        key = start.key
        try:
            finished = await super().finish(start, sampling)
            finished.timeline = replace(finished.timeline, turns=self._times[key])
        finally:
            self._times.pop(key, None)
        return finished

    def turn_engine(self, start: Trajectory) -> RolloutEngine:
        engine = self.timed_engine(start)
        self._times[start.key] = engine.times
        return engine

    def timed_engine(self, start: Trajectory) -> TimedEngine:
        """Return the engine that a trajectory samples through."""
        return TimedEngine(self.engine, self.clock)

    def busy_share(self) -> float:
        """Return the share of time since the last call in which any request was running."""
        return self.clock.take_share()


def replica_class(config: Config) -> type[TimedReplica]:
    """Return what hosts an engine, where no other option asks for more."""
    return TimedReplica


class EngineShare(Hook):
    """Adds the mean share of a step in which an engine sampled."""

    def on_trained(self, trainer: RayPPOTrainer, metrics: Metrics) -> None:
        """Ask the engines."""
        if trainer.rollouts is not None and (shares := trainer.rollouts.call("busy_share")):
            metrics["perf/engine_busy_share"] = float(sum(shares) / len(shares))


def hook(parts: Parts) -> EngineShare:
    """Return the hook of a run."""
    return EngineShare()


def measure(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the waits of trajectories that have just been sampled, and their prefix hits."""
    return wait_metrics(trajectories, time.time()) | engine_metrics(trajectories)


def wait_metrics(trajectories: Sequence[Trajectory], now: float) -> Metrics:
    """Return the mean seconds that a trajectory waited, by reason; empty if no turn was timed.

    `tools`: between turns; `weights`: for new weights before a turn; `slot`: for a slot in its
    engine, if reported; `others`: from its end to `now`, for the other trajectories.
    """
    timed = [t.timeline.turns for t in trajectories if t.timeline.turns]
    if not timed:
        return {}
    tools = [sum(b.requested - a.finished for a, b in itertools.pairwise(turns)) for turns in timed]
    weights = [sum(turn.started - turn.requested for turn in turns) for turns in timed]
    others = [now - turns[-1].finished for turns in timed]
    slots = [sum(turn.measured.queued_s for turn in turns) for turns in timed]
    waits = {"tools": tools, "weights": weights, "others": others}
    if any(slots):  # an engine reported them
        waits["slot"] = slots
    return {f"rollout/wait_s/{name}": float(np.mean(values)) for name, values in waits.items()}


def engine_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the share of prompt tokens that engines had in their prefix caches, if reported."""
    total = sum((turn.measured for t in trajectories for turn in t.timeline.turns), Measured())
    return (
        {"rollout/prefix_hit_share": total.num_cached / total.num_prompt}
        if total.num_prompt
        else {}
    )
