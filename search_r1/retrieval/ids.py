"""Finds documents of a corpus by their ids."""

import functools
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from search_r1.retrieval.schema import Document


class Documents(Protocol):
    """A corpus, as far as ids need it."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Document: ...

    def __iter__(self) -> Iterator[Document]: ...


class Ids:
    """The ids of a corpus.

    If they are row numbers, as in wiki-18, a search reads one row. Otherwise the first one reads
    the whole corpus and keeps 16 bytes of memory per document.
    """

    def __init__(self, corpus: Documents) -> None:
        self._corpus = corpus

    def find(self, id: str) -> Document | None:
        """Return the first document with this id, or None."""
        corpus = self._corpus
        if id.isascii() and id.isdigit() and len(id) < 19 and int(id) < len(corpus):
            document = corpus[int(id)]
            if document.id == id:
                return document
        hashes, rows = self._rows_by_hash
        first = int(np.searchsorted(hashes, hash(id)))
        for i in range(first, len(rows)):
            if hashes[i] != hash(id):
                break
            document = corpus[int(rows[i])]
            if document.id == id:
                return document
        return None

    @functools.cached_property
    def _rows_by_hash(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Sorted hashes of all ids, and the row of each hash."""
        ids = (document.id for document in self._corpus)
        hashes = np.fromiter(map(hash, ids), np.int64, len(self._corpus))
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order
