"""Turns are timed and held to their weights; one that is cut is the turn that was not."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from example.model import load_tokenizer
from tests.fakes import ScriptedEngine
from verl.rollout import replica as turns
from verl.rollout.interface import INTERRUPTED
from verl.rollout.replica import (
    BusyClock,
    PartialTurn,
    TurnEngine,
    WeightGate,
    ends_with_partial_stop,
)
from verl.rollout.schedule import Schedule, ScheduleEntry
from verl.types import Completion, EngineCounts, Sampling, TrajectoryKey


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
        engine = TurnEngine(scripted, clock, gate, min_version=3)
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
    first = engine.times[0]
    assert first.requested <= first.started <= first.finished
    assert (first.started - first.requested >= 0.005) == (gate is not None)


pytestmark = pytest.mark.asynchrony

FIRST, SECOND = ("1/0", 0, False), ("1/1", 0, False)


def gate_of(**versions: tuple[int, ...]) -> WeightGate:
    """A replica's gate, with a schedule of the trajectories `first` and `second`."""
    names = {"first": FIRST, "second": SECOND}
    rows = [ScheduleEntry(group=names[key][0], sample=0, greedy=False, replica=0, versions=found)
            for key, found in versions.items()]  # fmt: skip
    return WeightGate(Schedule(rows))


async def change(gate: WeightGate, version: int, num_calls: int = 0) -> None:
    async with gate.changing(version, num_calls):
        pass


async def sample(gate: WeightGate, name: TrajectoryKey, turn: int) -> int:
    """The version that samples it."""
    async with gate.sampling(min_version=0, part=(*name, turn, 0)):
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
    """Those of trajectories that nobody asks this engine for, as after a resume or the loss of
    another engine; and what a trajectory has fewer of than it had then."""

    async def play() -> None:
        gate = gate_of(first=(3, 3, 4), second=(3,))
        await change(gate, 5)  # the first weights of an engine in a run that was resumed
        gate.register([FIRST])
        newer = asyncio.create_task(change(gate, 6, num_calls=1))
        assert await waits(newer)
        gate.finish(FIRST)
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
            gate.register([FIRST])
            turn = asyncio.create_task(sample(gate, FIRST, 0))
            assert await waits(turn)
        assert await turn == 6

    run(play())
    assert "was sampled by version 3, which is gone" in caplog.text


PROMPT = (5, 6, 7)
STOP = ("</search>", "</answer>")
TEXTS = [
    "I </s look <search>who</search>",
    "Ünï🙂日本</search>",
    "it is < b </answer",
    "<answer>a</search",
]  # fmt: skip
"""The last two end with the end of the sequence, in the middle of a tag."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """Tags, and letters of other scripts, are several tokens in it."""
    return load_tokenizer()


@dataclass
class Typist:
    """Says its ids one by one, whatever it is asked; looks for stop strings in what it says itself,
    as engines do. New weights interrupt it where so many of the ids were said."""

    tokenizer: PreTrainedTokenizerBase
    ids: Sequence[int]
    cuts: list[int]
    version: int = 0
    seeds: list[int | None] = field(default_factory=list)
    """Of the requests that gave tokens."""

    async def ask(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        begin = len(ids) - len(PROMPT)
        assert tuple(ids) == (*PROMPT, *self.ids[:begin])
        said = await self._say(begin, sampling)
        self.seeds += [sampling.seed] if said.ids else []
        return said

    async def _say(self, begin: int, sampling: Sampling) -> Completion:
        for end in range(begin, len(self.ids) + 1):
            text = self.tokenizer.decode(self.ids[begin:end])
            if end == len(self.ids) or any(tag in text for tag in sampling.stop):
                return self._said(begin, end, text, "stop")
            if end - begin == sampling.max_tokens:
                return self._said(begin, end, text, "length")
            if end in self.cuts:
                self.cuts.remove(end)
                said = self._said(begin, end, text, INTERRUPTED)
                self.version += 1
                return said
        raise AssertionError("it always ends")

    def _said(self, begin: int, end: int, text: str, reason: str) -> Completion:
        log_probs = tuple(-float(place) for place in range(begin, end))
        return Completion(tuple(self.ids[begin:end]), log_probs, text, reason, self.version)


def play(typist: Typist, most: int = 100, untils: Sequence[int] = ()) -> Completion:
    """The whole turn; `untils` are the cuts that a schedule repeats."""

    async def turn() -> Completion:
        parts = PartialTurn(PROMPT, Sampling(most, stop=STOP, seed=3), typist.tokenizer.decode)
        for until in (*untils, *([None] * 9)):
            if whole := await parts.resume(typist.ask, until):
                return whole
            typist.version += until is not None
        raise AssertionError("nothing is cut so often")

    return asyncio.run(turn())


@pytest.mark.parametrize("text", TEXTS)
def test_a_cut_turn_is_the_whole_one_wherever_it_is_cut(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    """Once or twice, before the first token too: ids, text and ending are those without cuts, also
    within a stop string or a letter, each log-prob and version that of its token."""
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    for most in (len(ids) // 2, 100):
        whole = play(Typist(tokenizer, ids, []), most)
        for cuts in itertools.combinations(range(len(whole.ids)), 2):
            got = play(Typist(tokenizer, ids, list(cuts)), most)
            versions = tuple(sum(cut <= place for cut in cuts) for place in range(len(got.ids)))
            assert (got.ids, got.log_probs) == (whole.ids, whole.log_probs)
            assert got.finish_reason == whole.finish_reason
            assert got.text == whole.text
            assert got.weight_versions == (versions if len(set(versions)) > 1 else ())
            assert got.weight_version == versions[-1]


def test_each_part_has_a_seed_of_its_own_and_a_schedule_repeats_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """The first part's seed would repeat its randomness; cut by the number of tokens, the turn asks
    for the same again."""
    ids = tokenizer.encode(TEXTS[0])
    for cuts in itertools.combinations(range(1, len(ids)), 2):
        cut, again = Typist(tokenizer, ids, list(cuts)), Typist(tokenizer, ids, [])
        assert play(cut) == play(again, untils=cuts)
        assert cut.seeds == again.seeds
        assert len(set(cut.seeds)) == len(cut.seeds) >= 3 and cut.seeds[0] == 3


def test_the_beginning_of_a_stop_string_is_seen_at_the_end_only() -> None:
    """A whole one is no beginning."""
    found = [
        ends_with_partial_stop(text, STOP)
        for text in ("a <", "a </ans", "a </ans b", "</answer>", "")
    ]
    assert found == [True, True, False, False, False]
