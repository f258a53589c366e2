"""Finds accepted answers in retrieved passages, word by word and normalised as in rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from search_r1.retrieval.schema import Document
from search_r1.retrieval.tokenization import tokenize
from search_r1.rewards.normalize import matches_exactly, normalize_answer

CONTEXT_WORDS = 15
"""Number of words on each side of an answer in which key words of the question count."""
_EDGES = "\"'“”‘’`.,;:!?()[]{}*"


@dataclass(frozen=True)
class Evidence:
    """An occurrence of an accepted answer."""

    rank: int
    """Rank of the passage, from 1."""
    answer: str
    """The answer as written in the passage."""
    support: int
    """Number of key words of the question near the answer or in the title of the passage."""


@dataclass(frozen=True)
class Words:
    """A text split at white space, with the normalised form of each word."""

    text: str
    spans: tuple[tuple[int, int], ...]
    normalized: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> Words:
        spans = tuple(match.span() for match in re.finditer(r"\S+", text))
        return cls(text, spans, tuple(normalize_answer(text[a:b]) for a, b in spans))

    def slice(self, first: int, end: int) -> str:
        """Return the text of the words [first, end)."""
        return self.text[self.spans[first][0] : self.spans[end - 1][1]]

    def find(self, answer: str) -> Iterator[tuple[int, int]]:
        """Yield the ranges [first, end) of words that equal the answer; articles are ignored."""
        target = normalize_answer(answer).split()
        if not target:
            return
        positions = [i for i, word in enumerate(self.normalized) if word]
        for start in range(len(positions) - len(target) + 1):
            window = positions[start : start + len(target)]
            if [self.normalized[i] for i in window] == target:
                yield window[0], window[-1] + 1


def find_evidence(
    question: str, documents: Sequence[Document], accepted: Sequence[str]
) -> Evidence | None:
    """Return the occurrence with the most support, then the best rank, or None if there is none."""
    question_words = set(key_words(question))
    candidates = [
        evidence
        for rank, document in enumerate(documents, start=1)
        for answer in accepted
        for evidence in _in_document(rank, document, answer, question_words)
        if matches_exactly(evidence.answer, accepted)
    ]
    return max(candidates, key=lambda evidence: (evidence.support, -evidence.rank), default=None)


def key_words(text: str) -> list[str]:
    """Return the words that BM25 compares, in order: lower case, without English stop words."""
    return tokenize([text])[0]


def _in_document(
    rank: int, document: Document, answer: str, question_words: set[str]
) -> Iterator[Evidence]:
    """Yield all occurrences in the text, or, if there are none, in the title."""
    for text in (document.text, document.title):
        words = Words.of(text)
        occurrences = list(words.find(answer))
        for first, end in occurrences:
            context_end = min(len(words.spans), end + CONTEXT_WORDS)
            context = words.slice(max(0, first - CONTEXT_WORDS), context_end)
            support = len(question_words & set(key_words(f"{document.title} {context}")))
            yield Evidence(rank, words.slice(first, end).strip(_EDGES), support)
        if occurrences:
            return
