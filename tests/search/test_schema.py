"""The wire contract: how hits are written, also where a document holds what UTF-8 cannot."""

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_r1.search.schema import Document, Hit, from_wire, json_parts, written

TEXTS = st.text(st.characters(exclude_categories=()))  # lone surrogates too
DOCUMENTS = st.builds(Document, TEXTS, TEXTS, TEXTS, TEXTS)
HITS = st.lists(
    st.lists(st.builds(Hit, DOCUMENTS, st.floats(allow_nan=False, allow_infinity=False)))
)


def to_wire(hits: list[list[Hit]], return_scores: bool) -> dict[str, Any]:
    """The answer as plain data, by the library's way."""
    if return_scores:
        return {"result": [[asdict(hit) for hit in found] for found in hits]}
    return {"result": [[asdict(hit.document) for hit in found] for found in hits]}


def to_json(hits: list[list[Hit]], return_scores: bool, size: int = 99) -> bytes:
    """The answer, written in parts of so many queries."""
    return b"".join(json_parts(list(map(written, hits)), return_scores, size))


def replaced(value: object) -> object:
    """`value` after a passage through UTF-8 with `?` for what it cannot hold."""
    text = json.dumps(value, ensure_ascii=False)
    return json.loads(text.encode("utf-8", "replace"))


@pytest.mark.parametrize("return_scores", [True, False])
@given(hits=HITS)
def test_json_is_the_wire(hits: list[list[Hit]], return_scores: bool) -> None:
    """The fast writer says what the plain one says, and never fails on a lone surrogate."""
    written = json.loads(to_json(hits, return_scores))
    assert written == replaced(to_wire(hits, return_scores))


def test_written_documents_are_read_again() -> None:
    """A client gets the server's documents, with and without scores."""
    documents = [Document("1", "T", "x", "other contents"), Document("2", "", "y", "y")]
    hits = [[Hit(document, 0.5) for document in documents], []]
    for return_scores in (True, False):
        assert from_wire(json.loads(to_json(hits, return_scores))) == [documents, []]


@pytest.mark.parametrize("return_scores", [True, False])
@pytest.mark.parametrize("text", ["plain", "湖 \ud800 half"])
def test_parts_are_the_whole(return_scores: bool, text: str) -> None:
    """However many queries a part has, empty results and lone surrogates included."""
    hits = [[Hit(Document.from_contents(f"{i}", text), 0.5)] * (i % 3) for i in range(7)]
    for num_hits in range(8):
        whole = to_json(hits[:num_hits], return_scores)
        for size in range(1, 9):
            assert to_json(hits[:num_hits], return_scores, size) == whole
