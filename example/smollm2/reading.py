"""The agent of the reading phase: every dialogue begins with a search for the question itself.

`agent.name=example/smollm2/reading.py:reading` is `documents_first` with the call written as in the
dialogues of the cold start, so the policy meets what it was taught, and a group computes its
documents once.
"""

from __future__ import annotations

from dataclasses import dataclass

from example.smollm2.dialogues import FIRST_THOUGHTS, whole_query
from search_r1.agent.documents_first import DocumentsFirst
from search_r1.agent.generation import build_dialogue
from verl.agent.dialogue import DialogueAgent
from verl.agent.interface import ToolCall
from verl.config import Config


@dataclass(frozen=True)
class Reading(DocumentsFirst):
    """Documents first, after the call that asks for them."""

    def written(self, call: ToolCall) -> str:
        """Return the first turn of a demonstration."""
        query = whole_query(str(call.arguments))
        return f"<think> {FIRST_THOUGHTS[0]} </think> <search> {query} </search>"


def reading(config: Config) -> DialogueAgent:
    """Build the agent from a run's options."""
    return Reading.over(build_dialogue(config), config)
