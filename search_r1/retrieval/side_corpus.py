"""Finds documents by id in a corpus file that the engine itself does not read."""

import functools
import threading
from collections.abc import Callable
from pathlib import Path

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.schema import Document


def document_finder(path: str) -> Callable[[str], Document | None] | None:
    """Return what finds a document, and opens the corpus at the first call; None without a file."""
    if not Path(path).is_file():
        return None
    lock, open_cached = threading.Lock(), functools.cache(Corpus.open)

    def find(id: str) -> Document | None:
        with lock:
            corpus = open_cached(path)
        return corpus.find(id)

    return find
