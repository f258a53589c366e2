"""What each word of a query gives to the BM25 score of a document."""

from collections import defaultdict
from collections.abc import Sequence

import bm25s
import numpy as np


def shares_of_words(
    index: bm25s.BM25, words: Sequence[str], rows: Sequence[int]
) -> list[dict[str, float]]:
    """Return, for each row, the words that its document has, with their parts of the score."""
    shares: dict[int, dict[str, float]] = {row: defaultdict(float) for row in rows}
    starts, indices, data = (index.scores[name] for name in ("indptr", "indices", "data"))
    for word in words:
        for word_id in index.get_tokens_ids([word]):
            postings = slice(starts[word_id], starts[word_id + 1])
            for i in np.flatnonzero(np.isin(indices[postings], rows)):
                shares[int(indices[postings][i])][word] += float(data[postings][i])
    return [dict(shares[row]) for row in rows]
