"""The best documents of a query without reading every posting: loops that numba compiles.

MaxScore over windows of rows. A word gives at most its peak to a score. Once the k-th best sum so
far exceeds what the commonest words can give together, a document needs one of the other words to
be among the best: only their postings are read, and the common words are looked up, in a bitmap,
for the few documents that could still be. `bm25_pruned` prepares what they take.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, uint32, uint64

ROUNDING = 2.0**-22
"""More than the relative error, for each word, by which two orders of float32 sums may differ."""

compiled: Callable[[Any], Any] = njit(nogil=True, cache=True)
Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


class Postings(NamedTuple):
    """An inverted index: word w has the postings from `starts[w]` to `starts[w + 1]`."""

    scores: Scores
    """(num_postings,) above 0."""
    rows: npt.NDArray[np.int32]
    """(num_postings,) ascending within a word."""
    starts: Ids
    """(num_words + 1,)"""
    slots: npt.NDArray[np.int32]
    """(num_words,) row of a common word in `bits`; -1 for others."""
    bits: npt.NDArray[np.uint64]
    """(num_common, num_documents / 64) whether a document has the word."""
    ranks: npt.NDArray[np.int32]
    """As `bits`: the number of the word's documents before these 64."""


@compiled
def best_rows(
    postings: Postings, words: Ids, order: Ids, rest: Any, num_rare: int, best: Scores,
    sums: Scores, allowed: Mask,
) -> tuple[Any, Any]:  # fmt: skip
    """Return all rows that are among the best or tie with the last of them, and their scores.

    A score is summed in the order of `words` (num_words,); they are used in that of `order`, first
    `num_rare` without bitmaps, and those from i on give at most `rest[i]`. `best` (k,) and `sums`,
    as long as a window, are zeros; `sums` are zeros again afterwards. `allowed` (num_documents,):
    which rows may be found; (0,): all.
    """
    # Positions are unsigned, since numba lets signed ones count from the end, at a price.
    scores, rows, starts, slots, bits, ranks = postings
    slack = 1 + ROUNDING * len(words)
    cursors, ends, floor = starts[order], starts[order + 1], 0.0
    capacity = (ends - cursors).sum()
    found, totals = np.empty(capacity, dtype=np.int32), np.empty(capacity, dtype=np.float32)
    count, is_limited = 0, len(allowed) > 0
    used, low, width = len(order), 0, max(1, len(sums) // 16)
    while low < 64 * bits.shape[1]:
        high, width = low + width, min(2 * width, len(sums))
        while used > num_rare and rest[used - 1] < floor:
            used -= 1
        for i in range(used):
            at, end = cursors[i], ends[i]
            while at < end and rows[uint64(at)] < high:
                sums[uint32(rows[uint64(at)] - low)] += scores[uint64(at)]
                at += 1
        for i in range(used):
            at, end = cursors[i], ends[i]
            while at < end and rows[uint64(at)] < high:
                row = rows[uint64(at)]
                at += 1
                total = sums[uint32(row - low)]
                sums[uint32(row - low)] = 0
                if is_limited and not allowed[uint32(row)]:
                    continue
                if total == 0 or total + rest[used] < floor:
                    continue  # found by another word before, or it cannot be among the best
                for j in range(used, len(order)):
                    if total + rest[j] < floor:
                        break
                    total += share(scores, rows, starts, slots, bits, ranks, order[j], row)
                if total < floor:
                    continue
                push(best, total)
                floor = max(floor, best[0] / slack)
                found[count], totals[count] = row, total
                count += 1
            cursors[i] = at
        low = high
    kept = found[:count][totals[:count] >= floor]
    exact = np.zeros(len(kept), dtype=np.float32)
    for i in range(len(kept)):
        for word in words:
            exact[i] += share(scores, rows, starts, slots, bits, ranks, word, kept[i])
    return kept, exact


@compiled
def share(
    scores: Scores, rows: Any, starts: Ids, slots: Any, bits: Any, ranks: Any, word: int, row: int
) -> Any:
    """Return what a word gives to a document's score."""
    first, last, slot = starts[word], starts[word + 1], slots[word]
    if slot >= 0:
        block = bits[uint32(slot), uint32(row >> 6)]
        bit = uint64(1) << uint64(row & 63)
        if not block & bit:
            return np.float32(0)
        return scores[first + ranks[slot, row >> 6] + count_bits(block & (bit - uint64(1)))]
    while first < last:
        middle = (first + last) >> 1
        if rows[middle] == row:
            return scores[middle]
        if rows[middle] < row:
            first = middle + 1
        else:
            last = middle
    return np.float32(0)


@compiled
def count_bits(bits: Any) -> Any:
    """Return the number of ones among 64 bits: sums of 2, 4 and 8 bits side by side."""
    bits -= (bits >> uint64(1)) & uint64(0x5555555555555555)
    bits = (bits & uint64(0x3333333333333333)) + ((bits >> uint64(2)) & uint64(0x3333333333333333))
    bits = (bits + (bits >> uint64(4))) & uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((bits * uint64(0x0101010101010101)) >> uint64(56))


@compiled
def push(heap: Scores, value: Any) -> None:
    """Replace the smallest value of a heap, which is its first, by a larger one."""
    if value <= heap[0]:
        return
    at, child = 0, 1
    while child < len(heap):
        if child + 1 < len(heap) and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[at] = heap[child]
        at, child = child, 2 * child + 1
    heap[at] = value
