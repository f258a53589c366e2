"""Whether documents find themselves: encodes a few, and searches them in the index, at the start.

Row i of an index is document i of the corpus. Nothing in an index of other hands says so, and a
corpus that was sorted, filtered or shuffled since has the same number of rows.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.encoder import Encoder
from search_r1.retrieval.encoders.families import Vectors
from search_r1.retrieval.engines.vector_index import VectorIndex
from search_r1.retrieval.errors import IndexMismatch
from search_r1.retrieval.manifest import build_command

logger = logging.getLogger(__name__)

NUM_DOCUMENTS = 8
"""Documents that are encoded, evenly spread over the corpus."""
MIN_HITS, MAX_HITS, SHARE = 10, 1000, 20
"""A document should be among its first hits: as many as a 20th of the rows, within these limits.
The vectors of an index may be coarse, or those of shortened texts."""
SAME = 0.01
"""Scores are equal if they differ by less than this share of a document's score with itself."""
MAX_ELSEWHERE = 1
"""Number of documents whose very vector may be in another row: one, where texts are near copies."""


@dataclass(frozen=True)
class Stray:
    """A document that does not find itself."""

    row: int
    best: int | None
    """The row that fits it best, if any was found."""
    is_elsewhere: bool
    """Whether that row holds its very vector; otherwise it is only not among the first hits."""


def check_own_rows(
    name: str, path: Path, index: VectorIndex, corpus: Corpus, encoder: Encoder
) -> None:
    """Raise IndexMismatch unless most of a few documents find themselves in the index.

    `name`: the retriever's, for the command in the message. A single document that does not is a
    warning, since near copies of a text can change places.
    """
    rows = sample_rows(len(corpus))
    vectors = encoder.encode_passages([corpus[row].contents for row in rows])
    strays = list(_strays(rows, vectors, index, corpus, encoder))
    if not strays:
        logger.info("%d of %d sampled documents find their own row", len(rows), len(rows))
        return
    got = _describe(strays, len(rows), corpus)
    num_elsewhere = sum(stray.is_elsewhere for stray in strays)
    if num_elsewhere > MAX_ELSEWHERE or 2 * len(strays) > len(rows):
        save_dir = path.parent if path.is_dir() else Path("<folder>")
        raise IndexMismatch(
            f"index {path}: got {got}, expected vectors of this encoder in the order of this "
            "corpus; fix: give the corpus and the --retriever_model that it was built with, or "
            f"build it again: `{build_command(str(corpus.path), str(save_dir), name)}`"
        )
    logger.warning("index %s may be of another corpus or encoder: %s", path, got)


def sample_rows(count: int) -> list[int]:
    """Return up to NUM_DOCUMENTS rows, evenly spread, with both ends."""
    last = max(1, min(count, NUM_DOCUMENTS) - 1)
    return sorted({i * (count - 1) // last for i in range(min(count, NUM_DOCUMENTS))})


def _strays(
    rows: list[int], vectors: Vectors, index: VectorIndex, corpus: Corpus, encoder: Encoder
) -> Iterator[Stray]:
    is_l2 = index.info()["metric"] == "l2"
    # An inner product says which vectors are equal only if all have the same length.
    shows_equality = is_l2 or encoder.normalizes
    num_hits = max(MIN_HITS, min(MAX_HITS, len(corpus) // SHARE))
    found = zip(*index.search(vectors, num_hits), strict=True)
    for row, vector, (scores, hits) in zip(rows, vectors, found, strict=True):
        square = float(np.square(vector, dtype=np.float64).sum())
        if square == 0 or not math.isfinite(square):
            continue
        if not hits:
            yield Stray(row, None, is_elsewhere=False)
            continue
        tolerance = SAME * square * (2 if is_l2 else 1)
        if scores[-1] >= scores[0] - tolerance and len(hits) == num_hits:
            continue  # copies of this document fill the hits
        own = scores[hits.index(row)] if row in hits else None
        if own is not None and own >= scores[0] - tolerance:
            continue
        is_same = shows_equality and scores[0] >= (0 if is_l2 else square) - tolerance
        is_copy = corpus[hits[0]].contents == corpus[row].contents
        if not is_copy and (is_same or own is None):
            yield Stray(row, hits[0], is_elsewhere=is_same)


def _describe(strays: list[Stray], num_documents: int, corpus: Corpus) -> str:
    """Return a phrase that names the first stray document."""
    first = strays[0]
    document = f"document {corpus[first.row].id!r} (row {first.row}, from 0)"
    if first.is_elsewhere:
        where = f"the vector of {document} in row {first.best}"
    elif first.best is None:
        where = f"no hit for {document}"
    else:
        where = f"{document} not among its own first hits, row {first.best} as the best"
    return f"{where}; {len(strays)} of {num_documents} sampled documents do not find themselves"
