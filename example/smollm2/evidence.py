"""Where retrieved passages hold an accepted answer, word by word as rewards compare them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from search_r1.rewards.normalize import matches_exactly, normalize_answer
from search_r1.search.schema import Document
from search_r1.search.tokenization import tokenize

NEAR = 15
"""Words on each side of an answer in which the question's key words count."""
_EDGES = "\"'“”‘’`.,;:!?()[]{}*"


@dataclass(frozen=True)
class Evidence:
    """One place where an accepted answer stands."""

    rank: int
    """Of the passage, from 1."""
    answer: str
    """As the passage writes it."""
    support: int
    """How many of the question's key words stand near it, the passage's title included."""


@dataclass(frozen=True)
class Words:
    """A text cut at white space, and each word as it is compared."""

    text: str
    spans: tuple[tuple[int, int], ...]
    compared: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Words:
        spans = tuple(found.span() for found in re.finditer(r"\S+", text))
        return cls(text, spans, tuple(normalize_answer(text[a:b]) for a, b in spans))

    def slice(self, first: int, end: int) -> str:
        """The text from the word `first` up to, not including, the word `end`."""
        return self.text[self.spans[first][0] : self.spans[end - 1][1]]

    def find(self, answer: str) -> Iterator[tuple[int, int]]:
        """Where whole words equal the answer, as first word and end; articles may lie between."""
        wanted = normalize_answer(answer).split()
        kept = [i for i, word in enumerate(self.compared) if word]
        for start in range(len(kept) - len(wanted) + 1) if wanted else ():
            some = kept[start : start + len(wanted)]
            if [self.compared[i] for i in some] == wanted:
                yield some[0], some[-1] + 1


def find_evidence(
    question: str, documents: Sequence[Document], accepted: Sequence[str]
) -> Evidence | None:
    """The place with the most support, of equal ones that of the best passage; None if nowhere."""
    wanted = set(key_words(question))
    found = [
        evidence
        for rank, document in enumerate(documents, start=1)
        for answer in accepted
        for evidence in _in_document(rank, document, answer, wanted)
        if matches_exactly(evidence.answer, accepted)
    ]
    return max(found, key=lambda evidence: (evidence.support, -evidence.rank), default=None)


def key_words(text: str) -> list[str]:
    """The words that BM25 compares, in order: lower case, without English stop words."""
    return tokenize([text])[0]


def _in_document(
    rank: int, document: Document, answer: str, wanted: set[str]
) -> Iterator[Evidence]:
    """All places in the text, or else in the title."""
    for text in (document.text, document.title):
        words = Words.of(text)
        places = list(words.find(answer))
        for first, end in places:
            near = words.slice(max(0, first - NEAR), min(len(words.spans), end + NEAR))
            support = len(wanted & set(key_words(f"{document.title} {near}")))
            shown = words.slice(first, end).strip(_EDGES)
            yield Evidence(rank, shown, support)
        if places:
            return
