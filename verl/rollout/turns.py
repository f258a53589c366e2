"""What a trajectory samples from: the replica's engine, each turn timed and held to its weights."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from verl.engine import Listener, RolloutEngine
from verl.rollout.claims import Room
from verl.rollout.gate import WeightGate
from verl.rollout.parts import Ask, Decode, Parts
from verl.types import Completion, EngineCounts, Name, Sampling, TurnTimes


class BusyClock:
    """For which share of the time a replica was sampling."""

    def __init__(self) -> None:
        self._num_running, self._busy = 0, 0.0
        self._since = self._taken = time.perf_counter()

    def change(self, by: int) -> None:
        """One turn more, or less, is sampled from now on."""
        now = time.perf_counter()
        self._busy += now - self._since if self._num_running else 0.0
        self._num_running, self._since = self._num_running + by, now

    def take_share(self) -> float:
        """Since the last call, or since it was made."""
        self.change(0)
        elapsed, self._taken = self._since - self._taken, self._since
        busy, self._busy = self._busy, 0.0
        return busy / max(elapsed, 1e-9)


class TurnEngine(RolloutEngine):
    """The engine of one trajectory; without a gate, its weights are held for the whole of it."""

    def __init__(
        self, engine: RolloutEngine, clock: BusyClock, gate: WeightGate | None, at_least: int,
        name: Name = ("", 0, False), decode: Decode = str, room: Room | None = None,
    ) -> None:  # fmt: skip
        """`name`: group, number and whether greedy, by which a schedule knows its turns; `decode`
        makes the text of a turn that new weights cut; of the `room` it has taken its part."""
        self._engine, self._clock = engine, clock
        self._gate, self._at_least, self.name = gate, at_least, name
        self._decode, self._num_turns = decode, 0
        self.times: list[TurnTimes] = []
        self._queued_s, self._counts = 0.0, EngineCounts()
        self._room, self._takes_room = room or Room(), False
        self._take_room(True)

    def end(self) -> None:
        """No turn comes any more."""
        self._take_room(False)

    def _take_room(self, takes: bool) -> None:
        self._room.change(self._takes_room - takes)
        self._takes_room = takes

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        return await self._turn(prompt_ids, sampling, self._engine.generate)

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, listener: Listener
    ) -> Completion:
        async def ask(ids: Sequence[int], sampling: Sampling) -> Completion:
            return await self._engine.stream(ids, sampling, listener)

        return await self._turn(prompt_ids, sampling, ask)

    async def _turn(self, prompt_ids: Sequence[int], sampling: Sampling, ask: Ask) -> Completion:
        """One turn, by several weights where new ones interrupt it."""
        parts, number = Parts(prompt_ids, sampling, self._decode), self._num_turns
        self._num_turns += 1

        async def noted(ids: Sequence[int], sampling: Sampling) -> Completion:
            completion = await ask(ids, sampling)
            self._queued_s = completion.queued_s
            self._counts += completion.counts
            return completion

        self._take_room(True)
        try:
            while True:
                async with self._held(number, parts.num_tokens) as until:
                    whole = await parts.go_on(noted, until)
                if whole is not None:
                    return whole
        finally:
            self._take_room(False)

    @contextlib.asynccontextmanager
    async def _held(self, number: int, num_tokens: int) -> AsyncIterator[int | None]:
        """Hold the weights for the part of a turn that begins after so many of its tokens; gives
        the number after which a schedule has it end."""
        asked, gate = time.time(), self._gate
        part = (*self.name, number, num_tokens)
        held = gate.sampling(self._at_least, part) if gate else contextlib.nullcontext()
        async with held as until:
            began, self._queued_s, self._counts = time.time(), 0.0, EngineCounts()
            self._clock.change(+1)
            try:
                yield until
            finally:
                self._clock.change(-1)
                told = self._queued_s, self._counts
                self.times.append(TurnTimes(asked, began, time.time(), number, *told))
