"""Finds names of pages in questions and passages, as they are written there."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from example.smollm2.evidence import Words
from search_r1.datasets.evidence import page_name
from search_r1.retrieval.schema import Document
from search_r1.rewards.normalize import contains, normalize_answer

MIN_CHARS = 4
"""Shorter names, such as `It` or `Men`, are mostly other words."""
_EDGES = "\"'“”‘’`.,;:!?()[]{}*"
_QUALIFIER = re.compile(r"\s*\([^()]*\)\s*\Z")
_WITHIN = {"of", "the", "de", "von", "van", "for", "in", "&"}
"""Words in lower case that a name may have between others."""
_QUESTION_WORDS = {"are", "is", "was", "were", "do", "does", "did", "has", "have", "which", "who",
                   "what", "when", "where", "in", "both", "between", "of", "the"}  # fmt: skip


def mentioned(text: str, pages: Collection[str]) -> Iterator[str]:
    """Yield the names of `pages`, which are normalised, as a text writes them, in its order."""
    words = Words.of(text)
    positions = [i for i, word in enumerate(words.normalized) if word]
    lengths = sorted({len(page.split()) for page in pages} - {0}, reverse=True)
    for start in range(len(positions)):
        for length in lengths:
            window = positions[start : start + length]
            if " ".join(words.normalized[i] for i in window) in pages:
                name = words.slice(window[0], window[-1] + 1).strip(_EDGES)
                if len(window) == length and len(name) >= MIN_CHARS and name[0].isupper():
                    yield name
                    break


def named_pages(question: str, documents: Sequence[Document]) -> Mapping[str, Document]:
    """Return the first document of each page that the question names, by the page's name."""
    text = normalize_answer(question)
    found: dict[str, Document] = {}
    for document in documents:
        name = page_name(document.title, normalize_answer)
        if name and contains(text, name):
            found.setdefault(name, document)
    return {_QUALIFIER.sub("", document.title): document for document in found.values()}


def names_in(question: str) -> list[str]:
    """Return the runs of capitalised words of a question, without its first question words."""
    runs: list[list[str]] = [[]]
    words = question.rstrip("?. ").split()
    for number, word in enumerate(words):
        plain = word.strip(_EDGES)
        is_name = plain[:1].isupper() or plain[:1].isdigit()
        if number == 0 and plain.lower() in _QUESTION_WORDS:
            continue
        if is_name or (plain in _WITHIN and runs[-1]):
            runs[-1].append(word)
        else:
            runs.append([])
        if word.endswith(",") and runs[-1]:
            runs.append([])
    names = (re.sub(r"( (of|the|de|von|van|for|in|&))+$", "", " ".join(run)) for run in runs)
    plain_names = [name.strip("\"'“”‘’`.,;:!?") for name in names]
    return [name for name in plain_names if len(name) >= MIN_CHARS]
