"""Turns are timed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.fakes import ScriptedEngine
from verl.rollout import turns
from verl.rollout.turns import BusyClock, TurnEngine
from verl.types import Completion, EngineCounts, Sampling


def test_the_busy_share_counts_time_in_which_any_turn_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapping turns count once; a share covers the time since the previous call."""
    now = [0.0]
    monkeypatch.setattr(turns.time, "perf_counter", lambda: now[0])
    clock = BusyClock()
    for at, by in ((1.0, +1), (2.0, +1), (3.0, -1), (4.0, -1)):
        now[0] = at
        clock.change(by)
    now[0] = 10.0
    assert clock.take_share() == pytest.approx(0.3)
    clock.change(+1)
    now[0] = 12.0
    assert clock.take_share() == 1.0


class Queueing(ScriptedEngine):
    """An engine that reports a waiting time and cached tokens for each request."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        completion = await super().generate(prompt_ids, sampling)
        return replace(completion, queued_s=0.25, counts=EngineCounts(7, 3))


def test_a_turn_is_timed() -> None:
    """With what the engine reports; a turn that fails counts, and reports nothing."""

    async def play() -> TurnEngine:
        clock = BusyClock()
        engine = TurnEngine(Queueing(["a"]), clock)
        await engine.generate([1], Sampling(4))
        with pytest.raises(IndexError):  # the script has ended
            await engine.generate([1], Sampling(4))
        assert clock._num_running == 0
        return engine

    times = asyncio.run(play()).times
    assert [turn.queued_s for turn in times] == [0.25, 0.0]
    assert [turn.counts for turn in times] == [EngineCounts(7, 3), EngineCounts()]
    assert [turn.turn for turn in times] == [0, 1]
    assert times[0].requested == times[0].started <= times[0].finished
