"""Turns wait for their weights, and weights for turns; a schedule says for which."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.fakes import ScriptedEngine
from verl.ext.gated import GatedEngine, WeightGate
from verl.ext.replay import ReplayGate, Schedule, ScheduleEntry
from verl.ext.turn_times import BusyClock
from verl.types import Sampling, TrajectoryKey

pytestmark = pytest.mark.asynchrony


def test_a_turn_waits_for_its_weights() -> None:
    """Its times tell how long, also if it fails."""

    async def play() -> GatedEngine:
        gate, scripted = WeightGate(), ScriptedEngine(["a"])
        engine = GatedEngine(scripted, BusyClock(), gate, min_version=3)
        turn = asyncio.create_task(engine.generate([1], Sampling(4)))
        await asyncio.sleep(0.01)
        assert not scripted.requests
        async with gate.changing(3):
            pass
        await turn
        with pytest.raises(IndexError):  # the script has ended
            await engine.generate([1], Sampling(4))
        return engine

    first, second = asyncio.run(play()).times
    assert first.requested + 0.005 <= first.started <= first.finished
    assert second.started - second.requested < 0.005
    assert (first.turn, second.turn) == (0, 1)


FIRST, SECOND = ("1/0", 0), ("1/1", 0)


def gate_of(**versions: tuple[int, ...]) -> ReplayGate:
    """Return a gate with a schedule of the trajectories `first` and `second`."""
    groups = {"first": FIRST[0], "second": SECOND[0]}
    entries = [ScheduleEntry(group=groups[name], sample=0, replica=0, versions=turns)
               for name, turns in versions.items()]  # fmt: skip
    return ReplayGate(Schedule(entries))


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
