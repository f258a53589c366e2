"""Turns are timed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.fakes import ScriptedEngine
from verl.ext import turn_times
from verl.ext.turn_times import BusyClock, TimedEngine, engine_metrics, wait_metrics
from verl.types import Completion, Measured, Prompt, Sampling, Timeline, Trajectory, TurnTimes

PROMPT = Prompt("q", (), "nq", ())


def test_the_busy_share_counts_time_in_which_any_turn_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapping turns count once; a share covers the time since the previous call."""
    now = [0.0]
    monkeypatch.setattr(turn_times.time, "perf_counter", lambda: now[0])
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
        return replace(completion, measured=Measured(0.25, 7, 3))


def test_a_turn_is_timed() -> None:
    """With what the engine reports; a turn that fails counts, and reports nothing."""

    async def play() -> TimedEngine:
        clock = BusyClock()
        engine = TimedEngine(Queueing(["a"]), clock)
        await engine.generate([1], Sampling(4))
        with pytest.raises(IndexError):  # the script has ended
            await engine.generate([1], Sampling(4))
        assert clock._num_running == 0
        return engine

    times = asyncio.run(play()).times
    assert [turn.measured for turn in times] == [Measured(0.25, 7, 3), Measured()]
    assert [turn.turn for turn in times] == [0, 1]
    assert times[0].requested == times[0].started <= times[0].finished


def test_each_wait_is_a_mean_over_trajectories() -> None:
    """Waits for tools, weights, a slot in the engine, and the other trajectories."""
    one, two, untimed = (Trajectory(PROMPT, []) for _ in range(3))
    one.timeline = Timeline(
        turns=[TurnTimes(0, 1, 4, 0, Measured(0.5)), TurnTimes(6, 6, 9, 1, Measured(1.5))]
    )
    two.timeline = Timeline(turns=[TurnTimes(0, 3, 8)])
    assert wait_metrics([one, two, untimed], now=10.0) == {
        "rollout/wait_s/tools": 1.0, "rollout/wait_s/weights": 2.0,
        "rollout/wait_s/slot": 1.0, "rollout/wait_s/others": 1.5,
    }  # fmt: skip
    assert wait_metrics([untimed], now=10.0) == {}


def test_prefix_hits_are_a_share_of_all_prompt_tokens_of_turns() -> None:
    """Prompts count by their tokens; engines that report no counts give no metric."""
    one, two = Trajectory(PROMPT, []), Trajectory(PROMPT, [])
    one.timeline = Timeline(turns=[TurnTimes(0, 1, 4, 0, Measured(0.0, 100, 0)),
                      TurnTimes(6, 6, 9, 1, Measured(0.0, 300, 96))])  # fmt: skip
    two.timeline = Timeline(turns=[TurnTimes(0, 3, 8, measured=Measured(0.0, 100, 96))])
    assert engine_metrics([one, two]) == {"rollout/prefix_hit_share": 192 / 500}
    two.timeline = Timeline(turns=[TurnTimes(0, 3, 8)])
    assert engine_metrics([two]) == {}
