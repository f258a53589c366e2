"""BM25 over the example's passages, and the check that its questions are what they claim to be."""

from collections.abc import Sequence
from dataclasses import dataclass

import bm25s

from example.questions import Question
from search_r1.search.backends import bm25
from search_r1.search.schema import Document

MIN_PLAN_SHARE = 0.98  # of the planned searches must bring their passage first
LEAK_TOPK = 3  # one search with the whole question must not bring the last passage among so many


class PassageSearch:
    """The ranking of the retrieval server's BM25, in this process and without files."""

    def __init__(self, passages: Sequence[Document]) -> None:
        self._passages = list(passages)
        self._index = bm25s.BM25()
        words = bm25.tokenize([passage.contents for passage in passages])
        self._index.index(words, show_progress=False)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Document]]:
        """At most `topk` passages a query, best first."""
        return [self._search_one(words, topk) for words in bm25.tokenize(queries)]

    def _search_one(self, words: list[str], topk: int) -> list[Document]:
        scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(words))
        return [self._passages[row] for row in bm25.top_rows(scores, topk)]


@dataclass(frozen=True)
class Audit:
    """How well the planned searches work, and whether a shortcut exists; shares in [0, 1]."""

    plan_share: float  # planned searches that bring their passage first
    leak_share: float  # two-hop questions that one search with the whole question answers

    def check(self) -> None:
        """Raise ValueError unless the questions can be answered, and only as planned."""
        if self.plan_share < MIN_PLAN_SHARE:
            raise ValueError(
                f"got the planned passage for {self.plan_share:.1%} of the searches, expected at "
                f"least {MIN_PLAN_SHARE:.0%}: drop confusable names in example/world.py"
            )
        if self.leak_share > 0:
            raise ValueError(
                f"got {self.leak_share:.1%} two-hop questions that a single search answers, "
                f"expected none: filter them with without_shortcuts"
            )


def audit(questions: Sequence[Question], search: PassageSearch) -> Audit:
    """Run every planned search and every question as a query of its own."""
    hops = [hop for question in questions for hop in question.hops]
    found = search.search([hop.query for hop in hops], topk=1)
    hits = [ids_of(row) == [hop.passage_id] for row, hop in zip(found, hops, strict=True)]
    two_hop = [question for question in questions if len(question.hops) > 1]
    leaks = len(two_hop) - len(without_shortcuts(two_hop, search))
    return Audit(sum(hits) / len(hits), leaks / max(len(two_hop), 1))


def without_shortcuts(questions: Sequence[Question], search: PassageSearch) -> list[Question]:
    """The questions whose last passage is not found by searching for the question itself."""
    if not questions:
        return []
    found = search.search([question.text for question in questions], LEAK_TOPK)
    return [
        question
        for question, row in zip(questions, found, strict=True)
        if question.hops[-1].passage_id not in ids_of(row)
    ]


def ids_of(passages: Sequence[Document]) -> list[str]:
    """The passages' ids, in order."""
    return [passage.id for passage in passages]
