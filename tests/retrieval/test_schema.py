"""The wire contract: serialization of hits, also of text that UTF-8 cannot encode."""

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.retrieval.schema import Document, Hit, from_wire
from search_r1.retrieval.service.answers import response_chunks, serialize_hits

TEXTS = st.text(st.characters(exclude_categories=()))  # lone surrogates too
DOCUMENTS = st.builds(Document, TEXTS, TEXTS, TEXTS, TEXTS)
HITS = st.lists(
    st.lists(st.builds(Hit, DOCUMENTS, st.floats(allow_nan=False, allow_infinity=False)))
)


def to_wire(hits: list[list[Hit]], return_scores: bool) -> dict[str, Any]:
    """Return the response as plain data, built with dataclasses."""
    if return_scores:
        return {"result": [[asdict(hit) for hit in found] for found in hits]}
    return {"result": [[asdict(hit.document) for hit in found] for found in hits]}


def to_json(hits: list[list[Hit]], return_scores: bool, size: int = 99) -> bytes:
    """Return the serialized response, joined from chunks of `size` queries."""
    return b"".join(response_chunks(list(map(serialize_hits, hits)), return_scores, size))


def replaced(value: object) -> object:
    """Return `value` with lone surrogates replaced by `?`."""
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(text.encode("utf-8", "replace"))


@pytest.mark.parametrize("return_scores", [True, False])
@given(hits=HITS)
def test_fast_serialization_equals_the_plain_one(
    hits: list[list[Hit]], return_scores: bool
) -> None:
    """The fast serialization equals the plain one and never fails on a lone surrogate."""
    response = json.loads(to_json(hits, return_scores))
    assert response == replaced(to_wire(hits, return_scores))


def test_serialized_documents_are_parsed() -> None:
    """A client parses the server's documents, with and without scores."""
    documents = [Document("1", "T", "x", "other contents"), Document("2", "", "y", "y")]
    hits = [[Hit(document, 0.5) for document in documents], []]
    for return_scores in (True, False):
        assert from_wire(json.loads(to_json(hits, return_scores))) == [documents, []]


@pytest.mark.parametrize("return_scores", [True, False])
@pytest.mark.parametrize("text", ["plain", "湖 \ud800 half"])
def test_chunks_add_up_to_the_response(return_scores: bool, text: str) -> None:
    """Chunks of any size add up to the same response, also with empty results and surrogates."""
    hits = [[Hit(Document.from_contents(f"{i}", text), 0.5)] * (i % 3) for i in range(7)]
    for num_hits in range(8):
        whole = to_json(hits[:num_hits], return_scores)
        for size in range(1, 9):
            assert to_json(hits[:num_hits], return_scores, size) == whole


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"document": {"contents": '"T"\na'}}, ("T", "a", '"T"\na')),  # the original's web searches
        ({"document": {"contents": '"T"\na'}, "score": "0.5"}, ("T", "a", '"T"\na')),
        ({"text": "a\nb"}, ("", "a\nb", "a\nb")),
        ({"title": "T", "text": "a"}, ("T", "a", '"T"\na')),
        ({"title": None, "content": "a", "url": "u"}, ("", "a", "a")),
        ({"document": "a", "score": 1}, ("", "a", "a")),
        ("a", ("", "a", "a")),
    ],
)
def test_documents_of_other_servers_are_documents(
    item: object, expected: tuple[str, str, str]
) -> None:
    """Without an id they get one by their contents, so that the same document is recognised."""
    (first, again), (other,) = from_wire({"result": [[item, item], [{"text": "other"}]]})
    assert (first.title, first.text, first.contents) == expected
    assert first == again and first.id and first.id != other.id


@pytest.mark.parametrize("item", [{"document": None}, {"score": 1}, 7, None, {"text": 7}, ["a"]])
def test_what_has_no_text_is_no_document(item: object) -> None:
    """It is an error of the wire contract, not an empty document."""
    with pytest.raises((KeyError, TypeError)):
        from_wire({"result": [[item]]})
