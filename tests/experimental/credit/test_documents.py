"""Removal of a document from a dialogue, against the agent's own wording of the others."""

import dataclasses

import pytest

from search_r1.agent.tags import R1_SEARCHER, SEARCH_R1, SHORT
from search_r1.experimental.credit.worth import answer_tokens, documents_of, remove_document
from search_r1.retrieval.schema import Document
from search_r1.runs.dialogue import read_dialogue
from verl.agent.tags import ITEM_WITH_ID, TagFormat

DOCUMENTS = [
    Document.from_title("a", "France", "Its capital\nis Paris."),
    Document.from_title("b", "Doc 3", 'See Doc 1 (Title: "France").'),
    Document.from_title("c", "", "Rome"),
]
FORMATS = [SEARCH_R1, SHORT, R1_SEARCHER, dataclasses.replace(SEARCH_R1, item=ITEM_WITH_ID)]


@pytest.mark.parametrize("wording", [format.with_tools(["search"]) for format in FORMATS])
def test_the_remaining_text_is_what_the_agent_would_have_written(wording: TagFormat) -> None:
    """Ranks are renumbered; a document in two results is removed from both."""
    call = wording.tags.tool("search").wrap(" q ")
    results = [DOCUMENTS, DOCUMENTS[:2], DOCUMENTS[2:]]
    segments = [{"origin": "prompt", "text": "Question: who?\n"}]
    for documents in results:
        segments.append({"origin": "policy", "text": call})
        segments.append({"origin": "observation", "text": wording.observation(documents)})
    segments.append({"origin": "policy", "text": wording.tags.answer.wrap("x")})
    row = {"segments": segments, "ground_truth": ["Paris"], "components": {}}
    dialogue = read_dialogue(row, wording.tags)
    distinct = documents_of(dialogue)
    assert [document.title for document in distinct] == [document.title for document in DOCUMENTS]
    places = [document.places for document in distinct]
    assert places == [((0, 0), (1, 0)), ((0, 1), (1, 1)), ((0, 2), (2, 0))]
    assert [document.has_answer for document in distinct] == [True, False, False]
    for document, source in zip(distinct, DOCUMENTS, strict=True):
        expected = {
            2 + 2 * search: wording.observation([other for other in found if other is not source])
            for search, found in enumerate(results)
            if source in found
        }
        assert remove_document(dialogue, document, wording.tags) == expected


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
    """They are the tokens with text between the tags of the last answer."""
    assert answer_tokens(pieces, SEARCH_R1.tags) == expected
