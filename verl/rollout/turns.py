"""The engine as one trajectory sees it: each turn is timed, and sampled with fixed weights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from verl.engine import Listener, RolloutEngine
from verl.rollout.gate import WeightGate
from verl.types import Completion, EngineCounts, Sampling, TrajectoryKey, TurnTimes


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
