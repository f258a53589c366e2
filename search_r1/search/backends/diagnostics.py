"""Backends that an agent is judged against: no documents, documents by chance, the row's own.

An agent that searches well must beat `empty` and `random`; `oracle` (see `oracle.py`) shows what it
would score if every search found the supporting passages.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from search_r1.search.backends.base import Retriever
from search_r1.search.backends.locations import open_corpus
from search_r1.search.backends.oracle import OracleRetriever, load_rows
from search_r1.search.backends.settings import RetrieverConfig
from search_r1.search.corpus import Corpus
from search_r1.search.errors import SetupError
from search_r1.search.schema import Hit


class EmptyRetriever:
    """Answers every query with no documents; needs no corpus and no index."""

    name = "empty"
    num_threads = 1
    num_documents = 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """One empty list per query."""
        return [[] for _ in queries]

    def info(self) -> dict[str, Any]:
        """The backend's name."""
        return {"engine": self.name}


class RandomRetriever:
    """Draws documents by a hash of seed and query: the same query always gets the same ones."""

    name = "random"
    num_threads = 1

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self._corpus = corpus
        self._seed = seed

    @property
    def num_documents(self) -> int:
        """Documents that can be drawn."""
        return len(self._corpus)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """`k` different documents per query with scores 1, 1/2, 1/3 ...; fewer if there are fewer.

        A smaller `k` gives the first documents of a larger one.
        """
        return [self._draw(query, k) for query in queries]

    def _draw(self, query: str, k: int) -> list[Hit]:
        key = f"{self._seed}\n{query}".encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(key, digest_size=16).digest()
        rows = draw_rows(int.from_bytes(digest, "big"), len(self._corpus), k)
        return [Hit(self._corpus[row], 1 / rank) for rank, row in enumerate(rows, start=1)]

    def info(self) -> dict[str, Any]:
        """Backend, seed and the corpus."""
        corpus = asdict(self._corpus.fingerprint)
        return {"engine": self.name, "seed": self._seed, "corpus": corpus}


def draw_rows(seed: int, num_rows: int, k: int) -> list[int]:
    """The first min(k, num_rows) of a shuffled range(num_rows), in time and memory of `k`."""
    generator = random.Random(seed)
    moved: dict[int, int] = {}  # Fisher-Yates, keeping only the places that were touched
    rows = []
    for place in range(min(k, num_rows)):
        other = generator.randrange(place, num_rows)
        rows.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return rows


def open_retriever(config: RetrieverConfig) -> Retriever:
    """`empty`, `random` over the corpus, or `oracle` over its rows and perhaps the corpus."""
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
