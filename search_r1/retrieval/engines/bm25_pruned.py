"""BM25 over a large index: the documents and scores of all postings, most of which stay unread."""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import bm25s
import numpy as np
import numpy.typing as npt

from search_r1.retrieval.corpus import Mask
from verl.machine import num_threads

Scores = npt.NDArray[np.float32]
logger = logging.getLogger(__name__)

WINDOW = 1 << 15
"""Rows whose sums are added at a time: 128 KiB, which a core's cache holds."""
COMMON = 32
"""A word is common, and gets a bitmap once it is searched, if more than one document in so many has
it: 1.5 bits for each document, and about a tenth of the index for all common words."""
ALL = np.zeros(0, dtype=bool)
"""For the loops: every row may be found."""
MAX_THREADS = 8
"""Threads that rank queries of one batch; what is not compiled runs in one of them at a time."""
MAX_K = 100
"""Most documents for which leaving postings out was measured to be faster than adding all."""


Ranked = tuple[list[int], list[float]]
Rank = Callable[[list[list[str]], int, Mask | None], Iterable[Ranked]]


class PrunedRanking:
    """Ranks as all postings do, bit for bit."""

    def __init__(self, index: bm25s.BM25, rank_all: Rank, window: int = WINDOW) -> None:
        """`window`: rows that are scored together. Raises ImportError without numba.

        The loops are compiled here, unless they were before.
        """
        from search_r1.retrieval.engines import bm25_loops  # noqa: PLC0415 imports numba

        self._index, self._rank_all = index, rank_all
        scores, rows, starts = (index.scores[name] for name in ("data", "indices", "indptr"))
        num_documents = int(index.scores["num_docs"])
        sizes = np.diff(starts)
        common = np.flatnonzero(sizes * COMMON > num_documents)
        slots = np.full(len(sizes), -1, dtype=np.int32)
        slots[common] = np.arange(len(common), dtype=np.int32)
        bits = np.zeros((len(common), num_documents // 64 + 1), dtype=np.uint64)
        ranks = np.zeros(bits.shape, dtype=np.int32)
        self._loops = bm25_loops
        self._postings = bm25_loops.Postings(scores, rows, starts, slots, bits, ranks)
        self._peaks = np.zeros(len(sizes), dtype=np.float32)  # of words that were searched
        self._window = window
        self._num_threads = min(MAX_THREADS, num_threads())
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="bm25")
        self([[next(iter(index.vocab_dict))]], 1, None)

    def __call__(self, queries: list[list[str]], k: int, allowed: Mask | None) -> Iterable[Ranked]:
        if k > MAX_K:
            return self._rank_all(queries, k, allowed)
        count = min(self._num_threads, len(queries))
        parts = [queries[i::count] for i in range(count)]
        ranked: list[Ranked] = [([], [])] * len(queries)
        found = self._threads.map(partial(self._rank_part, k=k, allowed=allowed), parts)
        for i, part in enumerate(found):
            ranked[i::count] = part
        return ranked

    def _rank_part(self, queries: list[list[str]], k: int, allowed: Mask | None) -> list[Ranked]:
        sums = np.zeros(self._window, dtype=np.float32)
        return [self._rank_one(words, k, allowed, sums) for words in queries]

    def _rank_one(self, words: list[str], k: int, allowed: Mask | None, sums: Scores) -> Ranked:
        ids = np.array(self._index.get_tokens_ids(words), dtype=np.int64)
        if not len(ids):
            return [], []
        for word in ids[self._peaks[ids] == 0]:
            self._prepare(word)
        # Rare words first, then those that give most.
        gain = np.where(self._postings.slots[ids] < 0, np.inf, self._peaks[ids])
        by_use = np.argsort(-gain)
        rest = np.zeros(len(ids) + 1)
        rest[:-1] = self._peaks[ids[by_use]][::-1].cumsum(dtype=np.float64)[::-1]
        rest *= 1 + self._loops.ROUNDING * len(ids)
        num_rare, best = int(np.isinf(gain).sum()), np.zeros(k, dtype=np.float32)
        rows, scores = self._loops.best_rows(
            self._postings, ids, ids[by_use], rest, num_rare, best, sums,
            ALL if allowed is None else allowed,
        )  # fmt: skip
        order = np.lexsort((rows, -scores))[:k]
        return rows[order].tolist(), scores[order].tolist()

    def _prepare(self, word: int) -> None:
        """Compute the peak of a word's scores and, if it is common, its bitmap.

        The peak comes last, since other threads take it as a sign that the bitmap is complete.
        """
        scores, rows, starts, slots, bits, ranks = self._postings
        postings = slice(starts[word], starts[word + 1])
        if (slot := slots[word]) >= 0:
            has_word = np.zeros(64 * bits.shape[1], dtype=bool)
            has_word[rows[postings]] = True
            bits[slot] = np.packbits(has_word, bitorder="little").view("<u8")
            ranks[slot, 1:] = np.bitwise_count(bits[slot, :-1]).cumsum()
        self._peaks[word] = scores[postings].max(initial=0)


def open_pruned(index: bm25s.BM25, rank_all: Rank) -> Rank:
    """Return what ranks a large index: PrunedRanking, or all postings where numba is missing."""
    logger.info("%d postings: compiling loops, which takes seconds the first time",
                len(index.scores["data"]))  # fmt: skip
    try:
        return PrunedRanking(index, rank_all)
    except (ImportError, RuntimeError) as error:  # RuntimeError: no folder for compiled loops
        logger.warning(
            "%s; searches of so many passages are several times as fast with numba and a folder "
            "for what it compiles: pip install numba, set NUMBA_CACHE_DIR", error,
        )  # fmt: skip
        return rank_all
