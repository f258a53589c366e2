"""Where the evidence for a question stands: in what its search finds, elsewhere, or nowhere.

A passage is evidence if it contains an accepted answer as whole words, by the rule with which the
answer would be scored. A short answer is easily contained by chance, so the shares are upper
bounds.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from enum import StrEnum
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from search_r1.retrieval.corpus import Corpus, sample_indices
from search_r1.retrieval.schema import Document
from search_r1.rewards.normalize import (
    OPPOSITES,
    RULES,
    Normalize,
    contains,
    contains_answer,
    normalize_accepted,
    rule_of,
    words_between_spaces,
    words_of,
)

BLOCK_ROWS = 20_000
"""Number of passages that a process scans at a time."""
SAMPLED_ROWS = 2000
"""Number of passages from which the frequency of words is estimated."""
_QUALIFIER = re.compile(r"\s*\([^()]*\)\s*\Z")
"""What tells pages of one name apart, as in `Mercury (planet)`; other pages do not write it."""

Titles = Mapping[str, set[str]]
"""Titles of the pages with evidence, by answer, all normalised."""


class Kind(StrEnum):
    """What a question asks for."""

    YES_NO = "yes_no"
    COMPARISON = "comparison"
    """A choice between things that the question names."""
    SPAN = "span"


class Evidence(StrEnum):
    """The nearest place where evidence for an answer stands."""

    TOPK = "topk"
    """In the documents of a search for the question."""
    LINKED = "linked"
    """In a page whose title one of those documents mentions."""
    CORPUS = "corpus"
    """Elsewhere in the corpus."""
    NOWHERE = "nowhere"
    UNKNOWN = "unknown"
    """The answer is yes or no, which no passage says."""


def kind_of(question: str, answers: Sequence[str], normalize: Normalize) -> Kind:
    """Return what a question asks for, judged by its accepted answers."""
    if {normalize_accepted(answer, normalize) for answer in answers} & OPPOSITES.keys():
        return Kind.YES_NO
    return Kind.COMPARISON if contains_answer(question, answers, normalize) else Kind.SPAN


class AnswerFinder:
    """Finds which of many answers a text contains.

    Each answer is looked for only in texts that have its rarest word. Answers in scripts without
    spaces between words have none, and are looked for in every text.
    """

    def __init__(self, answers: Iterable[str], frequency: Mapping[str, int]) -> None:
        """`answers` are normalised; `frequency`: about how often each word occurs."""
        self._by_word: dict[str, list[str]] = defaultdict(list)
        self._everywhere: list[str] = []
        for answer in sorted({answer for answer in answers if answer}):
            if words := words_between_spaces(answer):
                rarest = min(words, key=lambda word: (frequency.get(word, 0), -len(word), word))
                self._by_word[rarest].append(answer)
            else:
                self._everywhere.append(answer)
        self._words = frozenset(self._by_word)

    def in_text(self, text: str) -> list[str]:
        """Return the answers that a normalised text contains, as `contains` does."""
        words = self._words.intersection(words_between_spaces(text))
        candidates = [*self._everywhere, *(a for word in words for a in self._by_word[word])]
        return [answer for answer in candidates if contains(text, answer)]


def word_frequency(corpus: Corpus, normalize: Normalize) -> Counter[str]:
    """Count in how many passages of a sample each word occurs."""
    rows = sample_indices(len(corpus), SAMPLED_ROWS)
    texts = (normalize(corpus[row].contents) for row in rows)
    return Counter(word for text in texts for word in set(words_between_spaces(text)))


def _scan(
    path: Path, rule: str, finders: Mapping[Normalize, AnswerFinder], rows: range
) -> dict[str, set[str]]:
    """Return the titles of the passages among `rows` that contain each answer."""
    titles: dict[str, set[str]] = defaultdict(set)
    for document in Corpus.open(path).documents(rows):
        for normalize, finder in finders.items():
            for answer in finder.in_text(normalize(document.contents)):
                titles[answer].add(page_name(document.title, RULES[rule]))
    return dict(titles)


def page_name(title: str, normalize: Normalize) -> str:
    """Return a title as other pages mention it, normalised."""
    return normalize_accepted(_QUALIFIER.sub("", title), normalize)


def titles_by_answer(
    corpus: Corpus,
    answers: Iterable[str],
    rule: str,
    num_processes: int,
    report: Callable[[int], None],
) -> Titles:
    """Scan a corpus; returns the pages that contain each of the normalised answers, if any does.

    `rule` names a rule of `RULES`. `report` is called with the number of passages so far.
    """
    by_rule: dict[Normalize, list[str]] = defaultdict(list)
    for answer in answers:
        by_rule[rule_of(answer, RULES[rule])].append(answer)
    finders = {
        normalize: AnswerFinder(some, word_frequency(corpus, normalize))
        for normalize, some in by_rule.items()
    }
    starts = range(0, len(corpus), BLOCK_ROWS)
    blocks = [range(start, min(start + BLOCK_ROWS, len(corpus))) for start in starts]
    scan = partial(_scan, corpus.path, rule, finders)
    titles: dict[str, set[str]] = defaultdict(set)

    def add(results: Iterable[Mapping[str, set[str]]]) -> None:
        for block, result in zip(blocks, results, strict=True):
            for answer, found in result.items():
                titles[answer] |= found
            report(block.stop)

    if num_processes == 1 or len(blocks) == 1:
        add(map(scan, blocks))
    else:
        with ProcessPoolExecutor(num_processes, get_context("spawn")) as executor:
            add(executor.map(scan, blocks))
    return titles


def evidence_of(
    answers: Sequence[str], documents: Sequence[Document], titles: Titles, normalize: Normalize
) -> tuple[Evidence, int | None]:
    """Return where the evidence of a question is and, in `documents`, the rank of the first one.

    `documents` are those of a search for the question, best first; ranks count from 1. `titles` are
    those of `titles_by_answer`.
    """
    normalized = {normalize_accepted(answer, normalize) for answer in answers}
    if normalized & OPPOSITES.keys():
        return Evidence.UNKNOWN, None
    for rank, document in enumerate(documents, 1):
        if contains_answer(document.contents, answers, normalize):
            return Evidence.TOPK, rank
    found = [titles[answer] for answer in normalized if answer in titles]
    if not found:
        return Evidence.NOWHERE, None
    by_rule: dict[Normalize, set[str]] = defaultdict(set)
    for page in set().union(*found):
        by_rule[rule_of(page, normalize)].add(page)
    if any(mentions(rule(d.contents), pages) for rule, pages in by_rule.items() for d in documents):
        return Evidence.LINKED, None
    return Evidence.CORPUS, None


def mentions(text: str, pages: set[str]) -> bool:
    """Whether a normalised text contains the name of one of the pages as whole words."""
    words, lengths = text.split(), {len(page.split()) for page in pages} - {0}
    unspaced = (page for page in pages if words_of(page) != page.split())
    return any(contains(text, page) for page in unspaced) or any(
        " ".join(words[start : start + length]) in pages
        for length in lengths
        for start in range(len(words) - length + 1)
    )
