"""Parsing of recorded rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from search_r1.agent.tags import R1_SEARCHER, SEARCH_R1
from search_r1.rewards.normalize import normalize_answer
from search_r1.runs.dialogue import read_dialogue, rule_of, tags_of
from tests.runs import written as runs
from verl.agent import native

TAGS = SEARCH_R1.tags


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_training_row_and_a_validation_row_read_alike(tmp_path: Path) -> None:
    """Both give the same queries, documents, documents with the answer, and answer."""
    written = runs.dialogue("Q?", ["Paris"], "paris.", [("a b", [runs.ROME, runs.PARIS])])
    runs.start_run(tmp_path / "run")
    runs.write_rollouts(tmp_path / "run", 1, [(written, 1.0)])
    runs.write_validation(tmp_path / "run", 1, [(written, 1.0)])
    training = read_dialogue(*rows(tmp_path / "run/rollouts/step_00000001.jsonl"), TAGS)
    validation = read_dialogue(*rows(tmp_path / "run/validation/step_1.jsonl"), TAGS)
    for dialogue in (training, validation):
        assert (dialogue.question, dialogue.answer) == ("Q?", "paris.")
        assert dialogue.gold == ("Paris",) and dialogue.components == {"em": 1.0}
        assert dialogue.is_found and dialogue.is_given
        [search] = dialogue.searches
        assert (search.tool, search.query) == ("search", "a b")
        found = [(d.title, d.text, d.has_answer) for d in search.documents]
        assert found == [(*runs.ROME, False), (*runs.PARIS, True)]
    assert "".join(s["text"] for s in validation.segments) == written.text


@pytest.mark.parametrize(("prompt", "question"), [
    ("Question: one? <x> Question: two?<|im_end|>\nassistant", "two?"),
    ("no heading " * 40, ("no heading " * 40)[-300:]),
])  # fmt: skip
def test_a_question_is_found_in_the_prompt(prompt: str, question: str) -> None:
    """Rows without `question` show the text after the last `Question:`, or the prompt's end."""
    row = {"segments": [{"origin": "prompt", "text": prompt}], "ground_truth": ["x"],
           "components": {}}  # fmt: skip
    assert read_dialogue(row, TAGS).question == question


def _calls(turn: str, information: str, tags: Any) -> list[tuple[str, str]]:
    parts = [("policy", turn), ("observation", information)]
    row = {"segments": [{"origin": o, "text": t} for o, t in parts], "ground_truth": ["x"],
           "components": {}}  # fmt: skip
    return [(search.tool, search.query) for search in read_dialogue(row, tags).searches]


def test_calls_are_recognized_by_the_tags_of_the_run() -> None:
    """Other tags, native calls (several in a turn), and configured and unknown tools."""
    other = tags_of({"template": "r1_searcher"})
    assert other == R1_SEARCHER.tags
    text = "<|begin_of_query|> q <|end_of_query|>"
    assert _calls(text, R1_SEARCHER.observation([]), other) == [("search", "q")]
    call = '<tool_call>{"name": "search", "arguments": {"query": "%s"}}</tool_call>'
    both = "<tool_response>1</tool_response><tool_response>2</tool_response>"
    assert _calls(call % "a" + call % "b", both, tags_of({"template": native.NAME})) == [
        ("search", "{'query': 'a'}"), ("search", "{'query': 'b'}"),
    ]  # fmt: skip
    clock = tags_of({"template": "tools", "agent": {"tools": ["clock", "my/tool.py:Tool"]}})
    information = "<information>12</information>"
    assert _calls("<clock>now</clock>", information, clock) == [("clock", "now")]
    assert _calls("<own>1+1</own>", information, clock) == [("own", "1+1")]
    assert tags_of({}) == TAGS and tags_of({"template": "moved.yaml"}).tools == TAGS.tools


@pytest.mark.parametrize(("rule", "is_equal"), [("squad", False), ("unicode", True)])
def test_answers_are_compared_by_the_rule_of_the_run(rule: str, is_equal: bool) -> None:
    """The page counts what the run's own reward counted."""
    turns = {
        "<search>q</search>": "policy",
        "<information>Bogota\u0301</information>": "observation",
        "<answer>BOGOTA\u0301</answer>": "policy",
    }
    segments = [{"origin": origin, "text": text} for text, origin in turns.items()]
    row = {"segments": segments, "ground_truth": ["Bogot\u00e1"], "components": {}}
    found = read_dialogue(row, TAGS, rule_of({"reward_model": {"normalize": rule}}))
    assert found.is_found is is_equal and found.is_given is is_equal
    assert rule_of({}) is rule_of({"reward_model": None}) is normalize_answer


def test_a_call_without_a_result_is_no_search() -> None:
    """Feedback on an invalid turn contains no information tags."""
    assert _calls("<search> q </search>", "That was not valid.", TAGS) == []
