"""What is said of a replay: how far it is the record, in one sentence."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from search_r1.replay.findings import verdict
from search_r1.replay.playing import Edit, compared, play
from tests.replay.talking import SAID, SAMPLING, TalkingEngine, agent_of, searching
from verl.agent.interface import Item
from verl.types import Origin, Status, Trajectory


def said_of(edit: Edit, recorded: Trajectory) -> str:
    again = asyncio.run(play(agent_of(), TalkingEngine(), recorded, edit, SAMPLING, 4))
    return verdict(edit, compared(recorded, again, edit.turn), again)


@pytest.mark.parametrize(("edit", "begin"), [
    (Edit(), "Bit-identical to the record: all "),
    (Edit(2), "Bit-identical to the record: all "),
    (Edit(1, query="sea"), f"With the edited query it differs first at token "
                           f"{SAID[0].index('oslo') + 1} of turn 1, after "),
    (Edit(1, documents=[[Item("x", "Sky")]]),
     "With the edited documents it differs first at token 30 of what followed turn 1, after "
     f"{len(SAID[0])} tokens of the policy."),
])  # fmt: skip
def test_where_it_leaves_the_record_is_said(edit: Edit, begin: str) -> None:
    """By turn and token, counted from 1; or that it never does."""
    assert said_of(edit, searching()).startswith(begin)


def test_a_difference_of_log_probs_alone_is_said_apart() -> None:
    """The tokens are the record's; and of a replay that a tool ended, what failed."""
    recorded = searching()
    moved = [replace(s, log_probs=tuple(x - 0.5 for x in s.log_probs))
             if s.origin is Origin.POLICY else s for s in recorded.segments]  # fmt: skip
    other = replace(recorded, segments=moved)
    told = verdict(Edit(), compared(recorded, other), other)
    assert told.startswith("The record's tokens: all ") and "differ by up to 5.0e-01" in told
    failed = replace(recorded, status=Status.FAILED, error="nobody answers")
    assert verdict(Edit(), compared(recorded, failed), failed).endswith("failed: nobody answers")
