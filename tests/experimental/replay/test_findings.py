"""The verdict on a replay: one sentence on how far it matches the record."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from search_r1.experimental.replay.findings import verdict
from search_r1.experimental.replay.playing import Comparison, Edit, replay_trajectory
from tests.experimental.replay.scripted import (
    SAMPLING,
    TURNS,
    ScriptedEngine,
    agent_of,
    record_with_search,
)
from verl.agent.interface import Item
from verl.types import Failure, Origin, Status, Trajectory


def verdict_of(edit: Edit, recorded: Trajectory) -> str:
    replayed = asyncio.run(
        replay_trajectory(agent_of(), ScriptedEngine(), recorded, edit, SAMPLING, 4)
    )
    return verdict(edit, Comparison.of(recorded, replayed, edit.turn), replayed)


@pytest.mark.parametrize(("edit", "begin"), [
    (Edit(), "Bit-identical to the record: all "),
    (Edit(2), "Bit-identical to the record: all "),
    (Edit(1, query="sea"), f"With the edited query the replay first differs at token "
                           f"{TURNS[0].index('oslo') + 1} of turn 1, after "),
    (Edit(1, documents=[[Item("x", "Sky")]]),
     "With the edited documents the replay first differs at token 30 of the response to turn 1, "
     f"after {len(TURNS[0])} tokens of the policy."),
])  # fmt: skip
def test_the_first_difference_is_described(edit: Edit, begin: str) -> None:
    """It is given by turn and token, counted from 1."""
    assert verdict_of(edit, record_with_search()).startswith(begin)


def test_different_log_probs_and_failures_are_described() -> None:
    """Equal tokens with different log-probs, and a failed tool, have sentences of their own."""
    recorded = record_with_search()
    moved = [replace(s, log_probs=tuple(x - 0.5 for x in s.log_probs))
             if s.origin is Origin.POLICY else s for s in recorded.segments]  # fmt: skip
    other = replace(recorded, segments=moved)
    sentence = verdict(Edit(), Comparison.of(recorded, other), other)
    assert sentence.startswith("The same tokens: all ") and "differ by up to 5.0e-01" in sentence
    failed = replace(recorded, status=Status.FAILED, failure=Failure("nobody answers"))
    assert verdict(Edit(), Comparison.of(recorded, failed), failed).endswith(
        "failed: nobody answers"
    )
