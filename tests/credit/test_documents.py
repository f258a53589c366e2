"""Dialogues without one of their documents, against the agent's own wording of the others."""

import dataclasses

import pytest

from search_r1.agent.tags import R1_SEARCHER, SEARCH_R1, SHORT
from search_r1.credit.running import answer_tokens, documents_of, without
from search_r1.search.schema import Document
from search_r1.view.dialogue import read_dialogue
from verl.agent.tags import ITEM_WITH_ID, TagFormat

FOUND = [
    Document.from_title("a", "France", "Its capital\nis Paris."),
    Document.from_title("b", "Doc 3", 'See Doc 1 (Title: "France").'),
    Document.from_title("c", "", "Rome"),
]
FORMATS = [SEARCH_R1, SHORT, R1_SEARCHER, dataclasses.replace(SEARCH_R1, item=ITEM_WITH_ID)]


@pytest.mark.parametrize("words", [one.with_tools(["search"]) for one in FORMATS])
def test_what_is_left_is_what_the_agent_would_have_worded(words: TagFormat) -> None:
    """Ranks included; a document that two searches brought is left out of both, and others stay."""
    call = words.tags.tool("search").wrap(" q ")
    brought = [FOUND, FOUND[:2], FOUND[2:]]
    segments = [{"origin": "prompt", "text": "Question: who?\n"}]
    for documents in brought:
        segments.append({"origin": "policy", "text": call})
        segments.append({"origin": "observation", "text": words.observation(documents)})
    segments.append({"origin": "policy", "text": words.tags.answer.wrap("x")})
    row = {"segments": segments, "ground_truth": ["Paris"], "components": {}}
    dialogue = read_dialogue(row, words.tags)
    known = documents_of(dialogue)
    assert [one.title for one in known] == [one.title for one in FOUND]
    assert [one.places for one in known] == [((0, 0), (1, 0)), ((0, 1), (1, 1)), ((0, 2), (2, 0))]
    assert [one.has_answer for one in known] == [True, False, False]
    for number, document in enumerate(known):
        expected = {
            2 + 2 * search: words.observation([one for one in found if one is not FOUND[number]])
            for search, found in enumerate(brought)
            if FOUND[number] in found
        }
        assert without(dialogue, document, words.tags) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["<think>", "a", "</think>", "<answer>", " Pa", "ris", " ", "</answer>"], range(4, 7)),
        (["<ans", "wer>Pa", "ris</", "answer>"], range(1, 3)),
        (["<answer>a</answer>", "", "<answer>", "b", "", "</answer>"], range(3, 4)),
        (["<answer>", "</answer>"], range(0)),
        (["<answer>", "open"], range(0)),
        (["none"], range(0)),
    ],
)
def test_the_tokens_of_an_answer(pieces: list[str], expected: range) -> None:
    """Those that spell something between the last answer's tags."""
    assert answer_tokens(pieces, SEARCH_R1.tags) == expected
