"""Word tokenization for BM25, identical for corpus and queries."""

import logging
from collections.abc import Sequence

import bm25s

logging.getLogger("bm25s").setLevel(logging.INFO)  # bm25s sets its own logger to DEBUG


def tokenize(texts: Sequence[str]) -> list[list[str]]:
    """Return each text's lower-case words of two or more characters, without English stop words."""
    words: list[list[str]] = bm25s.tokenize(
        list(texts), stopwords="en", return_ids=False, show_progress=False
    )
    return words
