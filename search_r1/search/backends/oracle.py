"""The engine that knows each question's supporting passages, whatever is indexed.

A query belongs to the row whose question it is (case, punctuation and spaces aside). A model words
its queries itself, so any other query belongs to the row that BM25 over question and passages ranks
best, and finds nothing if it shares no word with any row.
"""

import hashlib
import json
import logging
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bm25s
import numpy as np

from search_r1.search.corpus import Corpus
from search_r1.search.errors import SetupError
from search_r1.search.schema import Document, Hit
from search_r1.search.words import tokenize

logging.getLogger("bm25s").setLevel(logging.INFO)  # it asks for DEBUG by itself

EXPECTED = (
    'expected {"question": "...", "documents": [{"id": "7", "contents": "..."}]}, or '
    '{"question": "...", "ids": ["7"]} with --corpus_path'
)


@dataclass(frozen=True)
class OracleRow:
    """A question and the passages that answer it."""

    question: str
    documents: tuple[Document, ...]


@dataclass(frozen=True)
class _Draft:
    """A row of the file before its ids are looked up in the corpus."""

    question: str
    documents: tuple[Document, ...] | None
    ids: tuple[str, ...]


class OracleRetriever:
    """Rows of equal questions are one: their passages come together, in the order of the file."""

    name = "oracle"
    num_threads = 1

    def __init__(self, rows: Sequence[OracleRow]) -> None:
        """`rows`: at least one."""
        self._passages: dict[str, dict[str, Document]] = {}
        for row in rows:
            of_question = self._passages.setdefault(normalise(row.question), {})
            for document in row.documents:
                of_question.setdefault(document.id, document)
        self._questions = list(self._passages)
        self._index = bm25s.BM25()
        texts = [_searched(*row) for row in self._passages.items()]
        self._index.index(_tokens(texts), show_progress=False)

    @property
    def num_documents(self) -> int:
        """Different passages of all rows."""
        return len({id for passages in self._passages.values() for id in passages})

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The first `k` passages of each query's row with scores 1, 1/2, 1/3 ..."""
        return [self._search_one(query, k) for query in queries]

    def _search_one(self, query: str, k: int) -> list[Hit]:
        found = self._passages.get(normalise(query))
        if found is None:
            found = self._best_row(query)
        passages = list(found.values())[:k]
        return [Hit(document, 1 / rank) for rank, document in enumerate(passages, start=1)]

    def _best_row(self, query: str) -> dict[str, Document]:
        """The passages of BM25's best row (the first of equal ones), none if no word is shared."""
        words = tokenize([query])[0]
        scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(words))
        best = int(np.argmax(scores))
        return self._passages[self._questions[best]] if scores[best] > 0 else {}

    def info(self) -> dict[str, Any]:
        """Engine, number of questions, and a hash of questions and passages."""
        hasher = hashlib.blake2b(digest_size=8)
        for question, passages in self._passages.items():
            fields = [[d.id, d.title, d.text, d.contents] for d in passages.values()]
            hasher.update(json.dumps([question, fields]).encode())
        rows = {"count": len(self._questions), "digest": hasher.hexdigest()}
        return {"engine": self.name, "rows": rows}


def normalise(question: str) -> str:
    """`question` without case, punctuation and repeated spaces; itself if nothing is left."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", question).casefold())
    return " ".join(words) or question.strip()


def load_rows(path: str | Path, corpus_path: str | None) -> list[OracleRow]:
    """The rows of the file at `path`; ids are looked up in the corpus, in one pass over it.

    Raises SetupError for a missing file, a malformed or missing row, or an id of no document.
    """
    drafts = list(_read(Path(path)))
    if not drafts:
        raise SetupError(f"{path} has no rows; {EXPECTED} on each line")
    wanted = {id for draft in drafts for id in draft.ids}
    found = _look_up(wanted, Path(path), corpus_path) if wanted else {}
    return [_complete(draft, found) for draft in drafts]


def _read(path: Path) -> Iterator[_Draft]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--oracle_path {path} cannot be read ({error}); {EXPECTED}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _draft(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise SetupError(
                f"{path} line {number}: {type(error).__name__} {error}, got {line[:80]!r}; "
                f"{EXPECTED}"
            ) from error


def _draft(row: Any) -> _Draft:
    """A parsed row; raises KeyError or TypeError for one of another form."""
    if not isinstance(row, Mapping):
        raise TypeError(f"the row is {type(row).__name__}, not an object")
    question = row["question"]
    if not isinstance(question, str):
        raise TypeError(f"question is {type(question).__name__}, not text")
    if "documents" in row:
        documents = tuple(Document.from_mapping(item) for item in _list(row, "documents"))
        return _Draft(question, documents, ())
    ids = _list(row, "ids")
    if not all(isinstance(id, str | int) and not isinstance(id, bool) for id in ids):
        raise TypeError("ids are neither text nor integers")
    return _Draft(question, None, tuple(str(id) for id in ids))


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    if not isinstance(row[name], list):
        raise TypeError(f"{name} is {type(row[name]).__name__}, not a list")
    values: list[Any] = row[name]
    return values


def _look_up(wanted: set[str], path: Path, corpus_path: str | None) -> dict[str, Document]:
    """The corpus's documents with the `wanted` ids."""
    if corpus_path is None:
        raise SetupError(
            f"{path} names passages by ids, but --corpus_path is not given; give the corpus that "
            "has them, or rows with documents"
        )
    found: dict[str, Document] = {}
    for document in Corpus.open(corpus_path):
        if document.id in wanted:
            found.setdefault(document.id, document)
            if len(found) == len(wanted):
                return found
    missing = sorted(wanted - found.keys())
    raise SetupError(
        f"{len(missing)} ids of {path} are in no row of {corpus_path}: {', '.join(missing[:5])} "
        "...; give the corpus that the ids were taken from"
    )


def _complete(draft: _Draft, found: Mapping[str, Document]) -> OracleRow:
    if draft.documents is not None:
        return OracleRow(draft.question, draft.documents)
    return OracleRow(draft.question, tuple(found[id] for id in draft.ids))


def _searched(question: str, passages: Mapping[str, Document]) -> str:
    """What BM25 sees of a row."""
    return "\n".join([question, *(document.contents for document in passages.values())])


def _tokens(texts: Iterable[str]) -> Any:
    tokens = bm25s.tokenize(list(texts), stopwords="en", show_progress=False)
    if not tokens.vocab:
        tokens.vocab[""] = 0  # rows of stop words only: an index needs a word
    return tokens
