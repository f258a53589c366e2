"""Diagnostic backends: no documents, random documents, or the supporting passages of a question.

An agent that searches well must beat `empty` and `random`; `oracle` shows what it would score if
every search found the supporting passages.
"""

import hashlib
import json
import random
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import orjson

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.manifest import open_corpus
from search_r1.retrieval.schema import Document, Hit
from search_r1.retrieval.settings import RetrieverConfig
from search_r1.retrieval.tokenization import fold, tokenize
from verl.files import read_text

EXPECTED = (
    'expected {"question": "...", "documents": [{"id": "7", "contents": "..."}]}, or '
    '{"question": "...", "ids": ["7"]} with --corpus_path'
)
Row = tuple[str, list[Document]]
"""A question and its supporting passages."""


class EmptyRetriever:
    """Finds no documents for any query; needs neither corpus nor index."""

    name = "empty"
    num_threads = 1
    num_documents = 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        return [[] for _ in queries]

    def info(self) -> dict[str, Any]:
        return {"engine": self.name}


class RandomRetriever:
    """Draws documents by a hash of seed and query, so that a query always gets the same ones."""

    name = "random"
    num_threads = 1

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.corpus, self.num_documents = corpus, len(corpus)
        self._seed = seed

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the first `k` documents drawn for each query, with scores 1, 1/2, 1/3 ..."""
        results = []
        for query in queries:
            key = f"{self._seed}\n{query}".encode("utf-8", "surrogatepass")
            digest = hashlib.blake2b(key, digest_size=16).digest()
            rows = draw_rows(int.from_bytes(digest, "big"), len(self.corpus), k)
            results.append([Hit(self.corpus[row], 1 / rank) for rank, row in enumerate(rows, 1)])
        return results

    def info(self) -> dict[str, Any]:
        corpus = asdict(self.corpus.fingerprint)
        return {"engine": self.name, "seed": self._seed, "corpus": corpus}


def draw_rows(seed: int, num_rows: int, k: int) -> list[int]:
    """Return the first min(k, num_rows) entries of a shuffled range(num_rows), in O(k)."""
    generator = random.Random(seed)
    moved: dict[int, int] = {}  # Fisher-Yates shuffle that stores only the entries it has swapped
    rows = []
    for position in range(min(k, num_rows)):
        other = generator.randrange(position, num_rows)
        rows.append(moved.get(other, other))
        moved[other] = moved.get(position, position)
    return rows


class OracleRetriever:
    """Finds the supporting passages of the question that a query belongs to, without an index.

    A query belongs to the row with the same question (ignoring case, punctuation and spaces), or
    else to the row that BM25 over question and passages ranks best; a query that shares no word
    with any row finds nothing. Rows with the same question are merged.
    """

    name = "oracle"
    num_threads = 1

    def __init__(self, rows: Sequence[Row]) -> None:
        """`rows` must not be empty."""
        self._passages: dict[str, dict[str, Document]] = {}
        for question, documents in rows:
            of_question = self._passages.setdefault(normalise(question), {})
            for document in documents:
                of_question.setdefault(document.id, document)
        self._questions = list(self._passages)
        self.num_documents = len({id for passages in self._passages.values() for id in passages})
        texts = [
            "\n".join([question, *(document.contents for document in passages.values())])
            for question, passages in self._passages.items()
        ]
        tokens: Any = bm25s.tokenize(list(map(fold, texts)), stopwords="en", show_progress=False)
        if not tokens.vocab:
            tokens.vocab[""] = 0  # all rows are stop words, but bm25s needs at least one word
        self._index = bm25s.BM25()
        self._index.index(tokens, show_progress=False)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the first `k` passages of each query's row, with scores 1, 1/2, 1/3 ..."""
        return [
            [Hit(d, 1 / rank) for rank, d in enumerate(self._passages_of(query)[:k], 1)]
            for query in queries
        ]

    def _passages_of(self, query: str) -> list[Document]:
        """Return the passages of the query's own question, else of BM25's best row, else none."""
        passages = self._passages.get(normalise(query))
        if passages is None:
            words = tokenize([query])[0]
            scores = self._index.get_scores_from_ids(self._index.get_tokens_ids(words))
            best = int(np.argmax(scores))
            passages = self._passages[self._questions[best]] if scores[best] > 0 else {}
        return list(passages.values())

    def info(self) -> dict[str, Any]:
        hasher = hashlib.blake2b(digest_size=8)
        for question, passages in self._passages.items():
            fields = [[d.id, d.title, d.text, d.contents] for d in passages.values()]
            hasher.update(json.dumps([question, fields]).encode())
        rows = {"count": len(self._questions), "digest": hasher.hexdigest()}
        return {"engine": self.name, "rows": rows}


def normalise(question: str) -> str:
    """Return `question` without case, punctuation and repeated spaces, unless nothing is left."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", question).casefold())
    return " ".join(words) or question.strip()


def load_rows(path: str | Path, corpus_path: str | None) -> list[Row]:
    """Read the rows of a jsonl file and look up their ids in the corpus; raises SetupError."""
    try:
        lines = read_text(path).split("\n")
    except (OSError, ValueError) as error:
        raise SetupError(f"--oracle_path {path} cannot be read ({error}); {EXPECTED}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                rows.append(_parse_row(orjson.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise SetupError(
                f"{path} line {number}: {type(error).__name__} {error}, got {line[:80]!r}; "
                f"{EXPECTED}"
            ) from error
    if not rows:
        raise SetupError(f"{path} has no rows; {EXPECTED} on each line")
    ids = {entry for _, passages in rows for entry in passages if isinstance(entry, str)}
    documents = _find_documents(ids, path, corpus_path) if ids else {}
    return [
        (question, [documents[e] if isinstance(e, str) else e for e in passages])
        for question, passages in rows
    ]


def _parse_row(row: Any) -> tuple[str, list[Document | str]]:
    """Return question and documents (or ids) of a row; raises KeyError or TypeError."""
    if not isinstance(row, Mapping):
        raise TypeError(f"the row is {type(row).__name__}, not an object")
    if not isinstance(row["question"], str):
        raise TypeError(f"question is {type(row['question']).__name__}, not text")
    name = "documents" if "documents" in row else "ids"
    if not isinstance(row[name], list):
        raise TypeError(f"{name} is {type(row[name]).__name__}, not a list")
    if name == "documents":
        return row["question"], [Document.from_mapping(item) for item in row[name]]
    if not all(isinstance(id, str | int) and not isinstance(id, bool) for id in row[name]):
        raise TypeError("ids are neither text nor integers")
    return row["question"], [str(id) for id in row[name]]


def _find_documents(
    ids: set[str], path: str | Path, corpus_path: str | None
) -> dict[str, Document]:
    """Return the corpus documents with the given ids; raises SetupError if any is missing."""
    if corpus_path is None:
        raise SetupError(
            f"{path} has ids, but --corpus_path is not given; give it, or rows with documents"
        )
    corpus = Corpus.open(corpus_path)
    found = {id: document for id in sorted(ids) if (document := corpus.find(id)) is not None}
    if missing := sorted(ids - found.keys()):
        raise SetupError(
            f"{len(missing)} ids of {path} are in no row of {corpus_path}: "
            f"{', '.join(missing[:5])} ...; expected ids of its documents: give the right corpus"
        )
    return found


def open_retriever(config: RetrieverConfig) -> Retriever:
    """Open `empty`, `random` or `oracle`."""
    if config.retriever_name == "empty":
        return EmptyRetriever()
    if config.retriever_name == "random":
        return RandomRetriever(open_corpus(config), config.diagnostics.seed)
    path = config.diagnostics.oracle_path
    if path is None:
        raise SetupError(
            "--retriever_name oracle without --oracle_path; expected jsonl rows such as "
            '{"question": "...", "documents": [{"id": "7", "contents": "..."}]}'
        )
    return OracleRetriever(load_rows(path, config.corpus_path))
