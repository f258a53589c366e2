"""A repeated schedule holds turns and weights to it, and never for something that may not come."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from verl.rollout.gate import WeightGate
from verl.rollout.schedule import Row, Schedule
from verl.types import Name

pytestmark = pytest.mark.asynchrony

FIRST, SECOND = ("1/0", 0, False), ("1/1", 0, False)


def gate_of(**versions: tuple[int, ...]) -> WeightGate:
    """A replica's gate, with a schedule of the trajectories `first` and `second`."""
    names = {"first": FIRST, "second": SECOND}
    rows = [Row(group=names[key][0], sample=0, greedy=False, replica=0, versions=found)
            for key, found in versions.items()]  # fmt: skip
    return WeightGate(Schedule(rows))


async def change(gate: WeightGate, version: int, num_calls: int = 0) -> None:
    async with gate.changing(version, num_calls):
        pass


async def sample(gate: WeightGate, name: Name, turn: int) -> int:
    """The version that samples it."""
    async with gate.sampling(at_least=0, part=(*name, turn, 0)):
        return gate.version


def run(body: Coroutine[Any, Any, None]) -> None:
    """To its end, which comes at once or never."""
    asyncio.run(asyncio.wait_for(body, 5))


async def waits(task: asyncio.Task[Any]) -> bool:
    """Whether it is still not over after all that could move has moved."""
    for _ in range(20):
        await asyncio.sleep(0)
    return not task.done()


def test_weights_wait_for_calls_that_were_made_before_them() -> None:
    """Calls may begin in another order than they were made: their turns still come first."""

    async def play() -> None:
        gate = gate_of(first=(1,), second=(1, 2))
        await change(gate, 1)
        gate.begin([FIRST])
        newer = asyncio.create_task(change(gate, 2, num_calls=2))
        assert await sample(gate, FIRST, 0) == 1 and await waits(newer)
        gate.begin([SECOND])
        assert await waits(newer)
        assert await sample(gate, SECOND, 0) == 1
        await newer
        assert await sample(gate, SECOND, 1) == 2

    run(play())


def test_weights_do_not_wait_for_turns_that_never_come() -> None:
    """Those of trajectories that nobody asks this engine for, as after a resume or the loss of
    another engine; and what a trajectory has fewer of than it had then."""

    async def play() -> None:
        gate = gate_of(first=(3, 3, 4), second=(3,))
        await change(gate, 5)  # the first weights of an engine in a run that was resumed
        gate.begin([FIRST])
        newer = asyncio.create_task(change(gate, 6, num_calls=1))
        assert await waits(newer)
        gate.end(FIRST)
        await newer

    run(play())


def test_a_turn_whose_weights_are_gone_is_told_and_sampled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From there on it is another run, which nobody should take for the same; but not while an
    engine loads."""

    async def play() -> None:
        gate = gate_of(first=(3, 6))
        await change(gate, 5)
        async with gate.changing(6):
            gate.begin([FIRST])
            turn = asyncio.create_task(sample(gate, FIRST, 0))
            assert await waits(turn)
        assert await turn == 6

    run(play())
    assert "was sampled by version 3, which is gone" in caplog.text
