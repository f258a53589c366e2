"""The words of BM25, the same for corpus and query."""

from collections.abc import Sequence

import bm25s


def tokenize(texts: Sequence[str]) -> list[list[str]]:
    """Lower-case words of two or more characters without English stop words, per text."""
    words: list[list[str]] = bm25s.tokenize(
        list(texts), stopwords="en", return_ids=False, show_progress=False
    )
    return words
