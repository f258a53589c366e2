"""A dialogue without one of its documents, as text; and where in a turn its answer stands. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from search_r1.view.dialogue import DOCUMENT, OBSERVATION, Dialogue
from verl.agent.grammar import Grammar

RANK = re.compile(r"^Doc \d+")


@dataclass(frozen=True)
class Document:
    """A document of a dialogue, wherever it stands."""

    title: str
    text: str
    id: str
    has_answer: bool
    places: tuple[tuple[int, int], ...]
    """Numbers of the search and of the document among those it brought, from 0."""


def documents_of(dialogue: Dialogue) -> list[Document]:
    """Each document once, in the order in which they were read."""
    found: dict[tuple[str, str], Document] = {}
    for number, search in enumerate(dialogue.searches):
        for rank, one in enumerate(search.documents):
            known = found.get((one.title, one.text))
            places = (*(known.places if known else ()), (number, rank))
            found[one.title, one.text] = Document(
                one.title, one.text, one.id, one.has_answer, places
            )
    return list(found.values())


def without(dialogue: Dialogue, document: Document, tags: Grammar) -> dict[int, str]:
    """The observations that a document stands in as they would be without it, by segment."""
    texts = {
        number: _left_out(one["text"], document, tags)
        for number, one in enumerate(dialogue.segments)
        if one["origin"] == OBSERVATION
    }
    return {n: text for n, text in texts.items() if text != dialogue.segments[n]["text"]}


def _left_out(text: str, document: Document, tags: Grammar) -> str:
    """An observation without the document; those behind it move up a rank."""
    opening, closing = map(re.escape, (tags.information.opening, tags.information.closing))
    between = re.compile(f"(?<={opening})(.*?)(?={closing})", re.DOTALL)
    return between.sub(lambda found: _kept(found[1], document), text)


def _kept(information: str, document: Document) -> str:
    starts = list(DOCUMENT.finditer(information))
    if not starts:
        return "" if information.strip() == document.text else information
    ends = [*(one.start() for one in starts[1:]), len(information)]
    kept = [
        information[one.start() : end]
        for one, end in zip(starts, ends, strict=True)
        if (one["title"], information[one.end() : end].strip()) != (document.title, document.text)
    ]
    ranks = (RANK.match(one[0]) for one in starts)
    moved = (RANK.sub(rank[0], one) for rank, one in zip(ranks, kept, strict=False) if rank)
    return information[: starts[0].start()] + "".join(moved)


def answer_tokens(pieces: Sequence[str], tags: Grammar) -> range:
    """Which tokens of a turn, given by their texts, spell what stands in its last answer tag; a
    token that reaches beyond the tag counts. Empty where there is none."""
    text = "".join(pieces)
    start = text.rfind(tags.answer.opening)
    end = text.find(tags.answer.closing, start)
    if start < 0 or end < 0:
        return range(0)
    start += len(tags.answer.opening)
    ends = list(itertools.accumulate(map(len, pieces)))
    inside = [
        number
        for number, (piece, last) in enumerate(zip(pieces, ends, strict=True))
        if last > start and last - len(piece) < end
    ]
    return range(inside[0], inside[-1] + 1) if inside else range(0)
