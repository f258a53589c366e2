"""Turns are timed, and a replica knows for which share of the time it sampled."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.fakes import ScriptedEngine
from verl.rollout import turns
from verl.rollout.gate import WeightGate
from verl.rollout.turns import BusyClock, TurnEngine
from verl.types import Completion, EngineCounts, Sampling


def test_the_busy_share_counts_time_in_which_any_turn_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that overlap count once; each share is of the time since the one before."""
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
    """Says of each request that it waited for a slot, and what it had cached."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        completion = await super().generate(prompt_ids, sampling)
        return replace(completion, queued_s=0.25, counts=EngineCounts(7, 3))


@pytest.mark.parametrize("gate", [WeightGate(), None])
def test_a_turn_waits_for_its_weights_and_is_timed(gate: WeightGate | None) -> None:
    """With a gate until the version is there; without one it begins at once. A failed one ends."""

    async def play() -> tuple[bool, TurnEngine]:
        clock, scripted = BusyClock(), Queueing(["a"])
        engine = TurnEngine(scripted, clock, gate, at_least=3)
        turn = asyncio.create_task(engine.generate([1], Sampling(4)))
        await asyncio.sleep(0.01)
        began_at_once = bool(scripted.requests)
        if gate is not None:
            async with gate.changing(3):
                pass
        await turn
        with pytest.raises(IndexError):  # the script is over
            await engine.generate([1], Sampling(4))
        assert clock._num_running == 0
        return began_at_once, engine

    began_at_once, engine = asyncio.run(play())
    assert began_at_once == (gate is None)
    assert [turn.queued_s for turn in engine.times] == [0.25, 0.0]  # a failed one tells nothing
    assert [turn.counts for turn in engine.times] == [EngineCounts(7, 3), EngineCounts()]
    assert len(engine.times) == 2
    asked, began, ended = engine.times[0].asked, engine.times[0].began, engine.times[0].ended
    assert asked <= began <= ended and (began - asked >= 0.005) == (gate is not None)
