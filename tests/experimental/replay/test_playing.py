"""Replays with a scripted engine: which parts are recorded, and which are sampled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from search_r1.experimental.replay.playing import (
    Comparison,
    Edit,
    FindResponse,
    replay_trajectory,
    response_finder,
    turns_of,
)
from search_r1.retrieval.in_memory import InMemoryRetrieval
from tests.experimental.replay.scripted import (
    RESULTS,
    SAMPLING,
    TOKENIZER,
    TURNS,
    ScriptedEngine,
    agent_of,
    record,
    record_with_search,
)
from tests.fakes import UnavailableRetriever
from tests.runs.written import TOKENIZER as VOCABULARY
from verl.agent.dialogue import DialogueAgent, derived_seed
from verl.agent.interface import Item
from verl.data.trajectories import prepare_folder, write_step
from verl.errors import DataError
from verl.rewards.interface import Reward
from verl.types import Origin, Segment, Status, Trajectory


def replay(
    recorded: Trajectory, edit: Edit, agent: DialogueAgent | None = None,
    engine: ScriptedEngine | None = None, find_response: FindResponse = lambda turn: None,
) -> Trajectory:  # fmt: skip
    agent, engine = agent or agent_of(UnavailableRetriever()), engine or ScriptedEngine()
    return asyncio.run(replay_trajectory(agent, engine, recorded, edit, SAMPLING, 4, find_response))


def continue_dialogue(ids: Sequence[int], seed: int, number: int) -> list[int]:
    """Return the token ids of a new dialogue that continues `ids` with turn `number`."""
    agent, context = agent_of(), list(ids)
    for turn in range(number, agent.limits.max_turns + 1):
        sampling = agent._request(SAMPLING, seed, turn)
        assert sampling.seed == derived_seed(seed, turn)
        completion = asyncio.run(ScriptedEngine().generate(context, sampling))
        context += completion.ids
        parsed = agent.format.parse(completion)
        if parsed.answer is not None or turn == agent.limits.max_turns:
            break
        results = [RESULTS[call.arguments] for call in parsed.calls]
        items = [[Item(d.text, d.title) for d in documents] for documents in results] or None
        text = agent.format.respond(parsed, items, TOKENIZER.all_special_tokens)
        context += TOKENIZER.encode(text)
    return context


@pytest.mark.parametrize("turn", [1, 2])
def test_without_an_edit_the_replay_equals_the_record(turn: int) -> None:
    """Fifty dialogues are equal in every log-prob, statistics and status, without a tool call."""
    for seed in range(50):
        recorded = record(seed)
        replayed = replay(recorded, Edit(min(turn, len(turns_of(recorded)))))
        assert replayed.segments == recorded.segments and replayed.status is recorded.status
        # A replay does not search, so it has no shares of what searches gave.
        kept = {n: v for n, v in recorded.stats.items() if not n.endswith("_result_share")}
        assert replayed.stats == kept
        comparison = Comparison.of(recorded, replayed)
        assert comparison.differs_at is None and comparison.largest == 0
        assert comparison.num_tokens == recorded.num_policy_tokens


def test_turns_before_the_edit_are_not_sampled() -> None:
    """The engine's first request is the third turn, with that turn's seed."""
    recorded, engine = record_with_search(), ScriptedEngine()
    replayed = replay(recorded, Edit(3), engine=engine)
    before = recorded.segments[:5]
    assert engine.requests[0][0] == tuple(i for s in before for i in s.ids)
    assert engine.requests[0][1].seed == derived_seed(recorded.seed or 0, 2)
    assert replayed.segments == recorded.segments


def test_an_edited_query_is_searched_and_the_dialogue_continues() -> None:
    """The retriever returns new documents, and later turns are those of this new prefix."""
    recorded = record_with_search()
    retrieval = InMemoryRetrieval(RESULTS)
    replayed = replay(recorded, Edit(1, query="sea"), agent_of(retrieval))
    turn, response = replayed.segments[1:3]
    assert turn.text == TURNS[0].replace("oslo", "sea") and "Bergen lies" in response.text
    assert all(map(math.isnan, turn.log_probs)) and retrieval.queries[0] == "sea"
    ids = [i for segment in replayed.segments[:3] for i in segment.ids]
    assert replayed.ids == continue_dialogue(ids, recorded.seed or 0, 1)
    comparison = Comparison.of(recorded, replayed)
    at = TURNS[0].index("oslo")
    assert comparison.differs_at == (1, at) and comparison.num_tokens == at


def test_edited_documents_replace_the_results() -> None:
    """The policy's turn keeps its log-probs; later turns follow from the new context."""
    recorded = record_with_search()
    replayed = replay(recorded, Edit(1, documents=[[Item("It rains.", "Sky")]]), agent_of())
    assert replayed.segments[:2] == recorded.segments[:2]
    assert (
        replayed.segments[2].text
        == '\n\n<information>Doc 1(Title: "Sky") It rains.\n</information>\n\n'
    )
    ids = [i for segment in replayed.segments[:3] for i in segment.ids]
    assert replayed.ids == continue_dialogue(ids, recorded.seed or 0, 1)


def test_the_policy_continues_a_text_that_does_not_end_the_turn() -> None:
    """It does so within the turn's token budget; a text with a closing tag ends the turn."""
    recorded, engine = record_with_search(), ScriptedEngine()
    replayed = replay(recorded, Edit(1, text="<think> I would "), agent_of(), engine)
    ids, sampling = engine.requests[0]
    opening = TOKENIZER.encode("<think> I would ")
    assert ids == (*recorded.prompt.ids, *opening) and sampling.max_tokens == 200 - len(opening)
    assert replayed.segments[1].text.startswith("<think> I would <")
    known = [math.isnan(x) for x in replayed.segments[1].log_probs]
    assert known == [True] * len(opening) + [False] * (len(known) - len(opening))
    closed = replay(recorded, Edit(1, text="<answer> Rome </answer> and more"), agent_of())
    assert closed.text == "<answer> Rome </answer>" and closed.status is Status.ANSWERED


def test_results_of_other_trajectories_are_used(tmp_path: Path) -> None:
    """A query that only another dialogue of the run made gets its recorded result."""
    recorded, others = record_with_search(), [record(seed) for seed in range(20)]
    prepare_folder(tmp_path, VOCABULARY)
    write_step(tmp_path, 1, others, [Reward(0.0)] * len(others))
    find_response = response_finder(tmp_path, agent_of().format)
    replayed = replay(recorded, Edit(1, query="both"), find_response=find_response)
    assert replayed.status is not Status.FAILED and "Bergen" in replayed.segments[2].text


def test_a_failed_search_ends_the_replay_with_an_error_of_one_line() -> None:
    """The dialogue so far is kept, and the error says how to fix it."""
    replayed = replay(record_with_search(), Edit(1, query="fjords"))
    assert replayed.status is Status.FAILED and len(replayed.segments) == 2
    assert "\n" not in replayed.error and "search fjords was never recorded, and" in replayed.error
    assert "--retriever-url" in replayed.error


def test_a_response_over_the_budget_is_over_it_in_the_replay() -> None:
    """It was not recorded, and is not requested again."""
    narrow = {"max_prompt_length": 150}
    trajectories = [record(seed, agent_of(**narrow)) for seed in range(50)]
    out_of_budget = [t for t in trajectories if t.status is Status.OUT_OF_BUDGET]
    assert len(out_of_budget) > 5
    for recorded in out_of_budget:
        replayed = replay(recorded, Edit(), agent_of(UnavailableRetriever(), **narrow))
        assert replayed.segments == recorded.segments


@pytest.mark.parametrize(("edit", "problem"), [
    (Edit(9), "--turn: got 9, expected one of the policy's"),
    (Edit(1, documents=[[], []]), "documents: got 2 lists, expected 1, one for each call"),
    (Edit(1, text="x" * 300), "got 300 tokens that do not end the turn"),
])  # fmt: skip
def test_an_edit_that_does_not_fit_is_refused_in_one_line(edit: Edit, problem: str) -> None:
    """The error says what was got, what was expected, and the fix."""
    with pytest.raises(DataError) as caught:
        replay(record_with_search(), edit)
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_a_turn_without_a_call_has_no_query_to_edit() -> None:
    """The error suggests editing its text."""
    without_call = next(t for t in map(record, range(99)) if turns_of(t)[0][0].text == TURNS[2])
    with pytest.raises(DataError):
        replay(without_call, Edit(1, query="x"))


def test_the_first_difference_is_found() -> None:
    """A missing segment is a difference of tokens; log-probs may differ alone."""
    recorded = record_with_search()
    shorter = Trajectory(recorded.prompt, recorded.segments[:-1])
    last = len(recorded.segments) - 1
    assert Comparison.of(recorded, shorter).differs_at == (last, 0)
    turn = recorded.segments[1]
    log_probs = (turn.log_probs[0] - 0.25, *turn.log_probs[1:])
    other = Segment(Origin.POLICY, turn.ids, turn.text, log_probs, turn.weight_version)
    changed = Trajectory(recorded.prompt, [recorded.segments[0], other, *recorded.segments[2:]])
    comparison = Comparison.of(recorded, changed)
    assert comparison.differs_at is None and comparison.largest == pytest.approx(0.25)
