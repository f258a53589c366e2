"""Replays by an engine whose every turn follows from its context: what is told, what is sampled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from search_r1.replay.playing import Edit, Find, compared, finder, play, turns_of
from search_r1.search.client import InMemoryRetrieval
from search_r1.search.errors import RetrieverUnavailable
from search_r1.search.schema import Document
from tests.replay.talking import (
    FOUND,
    SAID,
    SAMPLING,
    TOKENIZER,
    TalkingEngine,
    agent_of,
    record,
    searching,
)
from tests.view.runs import TOKENIZER as VOCABULARY
from verl.agent.dialogue import DialogueAgent, derived_seed
from verl.agent.interface import Item
from verl.data.trajectories import prepare_folder, write_step
from verl.errors import DataError
from verl.rewards.interface import Reward
from verl.types import Origin, Segment, Status, Trajectory


class Away:
    """A retriever that may not be asked."""

    async def search(self, query: str) -> list[Document]:
        raise RetrieverUnavailable(f"nobody answers {query}")


def replay(
    recorded: Trajectory, edit: Edit, agent: DialogueAgent | None = None,
    engine: TalkingEngine | None = None, find: Find = lambda turn: None,
) -> Trajectory:  # fmt: skip
    agent, engine = agent or agent_of(Away()), engine or TalkingEngine()
    return asyncio.run(play(agent, engine, recorded, edit, SAMPLING, 4, find))


def fresh(ids: Sequence[int], seed: int, number: int) -> list[int]:
    """What a new dialogue says from a context on, turn `number` being next: by hand."""
    agent, known = agent_of(), list(ids)
    for turn in range(number, agent.limits.max_turns + 1):
        sampling = agent._request(SAMPLING, seed, turn)
        assert sampling.seed == derived_seed(seed, turn)
        said = asyncio.run(TalkingEngine().generate(known, sampling))
        known += said.ids
        asked = agent.format.parse(said)
        if asked.answer is not None or turn == agent.limits.max_turns:
            break
        documents = [FOUND[call.arguments] for call in asked.calls]
        items = [[Item(d.text, d.title) for d in found] for found in documents] or None
        known += TOKENIZER.encode(agent.format.respond(asked, items, TOKENIZER.all_special_tokens))
    return known


@pytest.mark.parametrize("turn", [1, 2])
def test_without_an_edit_it_is_the_record_and_no_tool_is_asked(turn: int) -> None:
    """Fifty dialogues, to the last bit of each log-prob, statistics and status included."""
    for seed in range(50):
        recorded = record(seed)
        again = replay(recorded, Edit(min(turn, len(turns_of(recorded)))))
        assert again.segments == recorded.segments and again.status is recorded.status
        assert again.stats == recorded.stats
        likeness = compared(recorded, again)
        assert likeness.differs_at is None and likeness.largest == 0
        assert likeness.num_tokens == recorded.num_policy_tokens


def test_turns_before_the_edit_are_told_not_sampled() -> None:
    """The engine is asked for the third turn first, with its own seed."""
    recorded, engine = searching(), TalkingEngine()
    again = replay(recorded, Edit(3), engine=engine)
    before = recorded.segments[:5]
    assert engine.requests[0][0] == tuple(i for s in before for i in s.ids)
    assert engine.requests[0][1].seed == derived_seed(recorded.seed or 0, 2)
    assert again.segments == recorded.segments


def test_another_query_is_asked_and_the_rest_is_a_fresh_dialogue() -> None:
    """Its documents come from the retriever now; later turns are those of that very prefix."""
    recorded = searching()
    retrieval = InMemoryRetrieval(FOUND)
    again = replay(recorded, Edit(1, query="sea"), agent_of(retrieval))
    said, brought = again.segments[1:3]
    assert said.text == SAID[0].replace("oslo", "sea") and "Bergen lies" in brought.text
    assert all(map(math.isnan, said.log_probs)) and retrieval.queries[0] == "sea"
    ids = [i for segment in again.segments[:3] for i in segment.ids]
    assert again.ids == fresh(ids, recorded.seed or 0, 1)
    likeness = compared(recorded, again)
    at = SAID[0].index("oslo")
    assert likeness.differs_at == (1, at) and likeness.num_tokens == at


def test_other_documents_take_the_place_of_those_that_were_found() -> None:
    """The policy's turn stays with its log-probs; what follows is that of the new context."""
    recorded = searching()
    again = replay(recorded, Edit(1, documents=[[Item("It rains.", "Sky")]]), agent_of())
    assert again.segments[:2] == recorded.segments[:2]
    assert (
        again.segments[2].text
        == '\n\n<information>Doc 1(Title: "Sky") It rains.\n</information>\n\n'
    )
    ids = [i for segment in again.segments[:3] for i in segment.ids]
    assert again.ids == fresh(ids, recorded.seed or 0, 1)


def test_the_policy_goes_on_from_a_text_that_ends_no_turn() -> None:
    """Within the same turn and its budget; a text with a closing tag is all of it."""
    recorded, engine = searching(), TalkingEngine()
    again = replay(recorded, Edit(1, text="<think> I would "), agent_of(), engine)
    ids, sampling = engine.requests[0]
    opening = TOKENIZER.encode("<think> I would ")
    assert ids == (*recorded.prompt.ids, *opening) and sampling.max_tokens == 200 - len(opening)
    assert again.segments[1].text.startswith("<think> I would <")
    known = [math.isnan(x) for x in again.segments[1].log_probs]
    assert known == [True] * len(opening) + [False] * (len(known) - len(opening))
    closed = replay(recorded, Edit(1, text="<answer> Rome </answer> and more"), agent_of())
    assert closed.text == "<answer> Rome </answer>" and closed.status is Status.ANSWERED


def test_what_another_trajectory_found_is_known(tmp_path: Path) -> None:
    """A query that only another dialogue of the run asked brings what it brought then."""
    recorded, others = searching(), [record(seed) for seed in range(20)]
    prepare_folder(tmp_path, VOCABULARY)
    write_step(tmp_path, 1, others, [Reward(0.0)] * len(others))
    find = finder(tmp_path, agent_of().format)
    again = replay(recorded, Edit(1, query="both"), find=find)
    assert again.status is not Status.FAILED and "Bergen" in again.segments[2].text


def test_an_unrecorded_query_that_nobody_answers_is_one_line() -> None:
    """The dialogue so far is kept; the error says what to do."""
    again = replay(searching(), Edit(1, query="fjords"))
    assert again.status is Status.FAILED and len(again.segments) == 2
    assert "\n" not in again.error and "search fjords was never recorded, and" in again.error
    assert "--retriever-url" in again.error


def test_what_did_not_fit_then_does_not_fit_now() -> None:
    """Documents that ended a dialogue were not recorded, and need not be asked for."""
    narrow = {"max_prompt_length": 150}
    ended = [record(seed, agent_of(**narrow)) for seed in range(50)]
    found = [one for one in ended if one.status is Status.OUT_OF_BUDGET]
    assert len(found) > 5
    for one in found:
        assert replay(one, Edit(), agent_of(Away(), **narrow)).segments == one.segments


@pytest.mark.parametrize(("edit", "problem"), [
    (Edit(9), "--turn: got 9, expected one of the"),
    (Edit(1, documents=[[], []]), "got documents for 2 calls, expected those of the 1"),
    (Edit(1, text="x" * 300), "got 300 tokens that end no turn"),
])  # fmt: skip
def test_an_edit_that_does_not_fit_is_refused_in_one_line(edit: Edit, problem: str) -> None:
    """Saying what was got, what was expected, and the fix."""
    with pytest.raises(DataError) as caught:
        replay(searching(), edit)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_a_turn_that_asks_nothing_has_no_query_to_edit() -> None:
    """Its text can be edited instead."""
    silent = next(one for one in map(record, range(99)) if turns_of(one)[0][0].text == SAID[2])
    with pytest.raises(DataError, match="edit its text instead"):
        replay(silent, Edit(1, query="x"))


def test_the_first_difference_is_named() -> None:
    """A token, a missing segment, or a log-prob alone."""
    recorded = searching()
    shorter = Trajectory(recorded.prompt, recorded.segments[:-1])
    last = len(recorded.segments) - 1
    assert compared(recorded, shorter).differs_at == (last, 0)
    said = recorded.segments[1]
    log_probs = (said.log_probs[0] - 0.25, *said.log_probs[1:])
    other = Segment(Origin.POLICY, said.ids, said.text, log_probs, said.weight_version)
    moved = Trajectory(recorded.prompt, [recorded.segments[0], other, *recorded.segments[2:]])
    likeness = compared(recorded, moved)
    assert likeness.differs_at is None and likeness.largest == pytest.approx(0.25)
