"""Turns are timed and sampled with fixed weights."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.fakes import ScriptedEngine
from verl.rollout import turns
from verl.rollout.gate import WeightGate
from verl.rollout.schedule import Schedule, ScheduleEntry
from verl.rollout.turns import BusyClock, TurnEngine
from verl.types import Completion, EngineCounts, Sampling, TrajectoryKey


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


@pytest.mark.parametrize("gate", [WeightGate(), None])
def test_a_turn_waits_for_its_weights_and_is_timed(gate: WeightGate | None) -> None:
    """With a gate it waits for its version; without one it starts at once. Failed turns count."""

    async def play() -> tuple[bool, TurnEngine]:
        clock, scripted = BusyClock(), Queueing(["a"])
        engine = TurnEngine(scripted, clock, gate, min_version=3)
        turn = asyncio.create_task(engine.generate([1], Sampling(4)))
        await asyncio.sleep(0.01)
        started_at_once = bool(scripted.requests)
        if gate is not None:
            async with gate.changing(3):
                pass
        await turn
        with pytest.raises(IndexError):  # the script has ended
            await engine.generate([1], Sampling(4))
        assert clock._num_running == 0
        return started_at_once, engine

    started_at_once, engine = asyncio.run(play())
    assert started_at_once == (gate is None)
    assert [turn.queued_s for turn in engine.times] == [0.25, 0.0]  # a failed turn reports nothing
    assert [turn.counts for turn in engine.times] == [EngineCounts(7, 3), EngineCounts()]
    assert len(engine.times) == 2
    first = engine.times[0]
    assert first.requested <= first.started <= first.finished
    assert (first.started - first.requested >= 0.005) == (gate is not None)


pytestmark = pytest.mark.asynchrony

FIRST, SECOND = ("1/0", 0), ("1/1", 0)


def gate_of(**versions: tuple[int, ...]) -> WeightGate:
    """Return a gate with a schedule of the trajectories `first` and `second`."""
    groups = {"first": FIRST[0], "second": SECOND[0]}
    entries = [ScheduleEntry(group=groups[name], sample=0, replica=0, versions=turns)
               for name, turns in versions.items()]  # fmt: skip
    return WeightGate(Schedule(entries))


async def change(gate: WeightGate, version: int, num_calls: int = 0) -> None:
    async with gate.changing(version, num_calls):
        pass


async def sample(gate: WeightGate, key: TrajectoryKey, turn: int) -> int:
    """Sample a turn; return the version that sampled it."""
    async with gate.sampling(min_version=0, turn=(*key, turn)):
        return gate.version


def run(body: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that ends immediately or never."""
    asyncio.run(asyncio.wait_for(body, 5))


async def waits(task: asyncio.Task[Any]) -> bool:
    """Whether the task is still waiting after all other tasks have made progress."""
    for _ in range(20):
        await asyncio.sleep(0)
    return not task.done()


def test_weights_wait_for_calls_that_were_made_before_them() -> None:
    """Calls may start out of order, but their turns still come first."""

    async def play() -> None:
        gate = gate_of(first=(1,), second=(1, 2))
        await change(gate, 1)
        gate.register([FIRST])
        newer = asyncio.create_task(change(gate, 2, num_calls=2))
        assert await sample(gate, FIRST, 0) == 1 and await waits(newer)
        gate.register([SECOND])
        assert await waits(newer)
        assert await sample(gate, SECOND, 0) == 1
        await newer
        assert await sample(gate, SECOND, 1) == 2

    run(play())


def test_weights_do_not_wait_for_turns_that_never_come() -> None:
    """New weights do not wait for turns of trajectories that this engine does not get.

    There are such after a resume or the loss of another engine. Nor do weights wait for the missing
    turns of a trajectory that ends with fewer turns than recorded.
    """

    async def play() -> None:
        gate = gate_of(first=(3, 3, 4), second=(3,))
        await change(gate, 5)  # the first weights of an engine in a resumed run
        gate.register([FIRST])
        newer = asyncio.create_task(change(gate, 6, num_calls=1))
        assert await waits(newer)
        gate.finish(FIRST)
        await newer

    run(play())


def test_a_turn_whose_weights_are_gone_is_logged_and_sampled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A warning says that the run differs from the recorded one if a turn's weights are gone.

    The turn still waits while weights are loaded.
    """

    async def play() -> None:
        gate = gate_of(first=(3, 6))
        await change(gate, 5)
        async with gate.changing(6):
            gate.register([FIRST])
            turn = asyncio.create_task(sample(gate, FIRST, 0))
            assert await waits(turn)
        assert await turn == 6

    run(play())
    assert "was sampled by version 3, which is gone" in caplog.text
