"""The engine as one trajectory sees it, and the time in which turns are sampled."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from verl.engine import Listener, RolloutEngine
from verl.types import Completion, EngineCounts, Sampling, TurnTimes


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
            queued_s = sum(completion.queued_s for completion in completions)
            counts = sum((completion.counts for completion in completions), EngineCounts())
            turn = TurnTimes(started, started, time.time(), number, queued_s, counts)
            self.times.append(turn)
