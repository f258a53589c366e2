"""Scans a corpus for the offsets of its rows and a hash of its content, kept beside it."""

import hashlib
import logging
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from search_r1.retrieval.errors import CorpusError
from verl.files import atomic_write

logger = logging.getLogger(__name__)

Offsets = npt.NDArray[np.int64]
MAX_ROW_BYTES = 1 << 24
"""Longer rows are refused, since no agent can read them."""
NEWLINE = 10
CHUNK_BYTES = 1 << 24


def scan(path: Path, data: mmap.mmap, status: os.stat_result, sidecar: Path) -> tuple[Offsets, int]:
    """Compute row offsets (num_documents + 1,) and hash in one pass, and store them in `sidecar`.

    Blank lines are skipped. Raises CorpusError if there are no rows or if one is too long.
    """
    hasher, newlines = hashlib.blake2b(digest_size=8), []
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        hasher.update(chunk)
        newlines.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == NEWLINE) + start)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.concatenate(newlines) + 1])
    ends = np.append(starts[1:], len(data))
    is_row = ends - starts > 1
    if not is_row.any():
        raise CorpusError(f"corpus {path} has blank lines only; expected a passage on each line")
    if (sizes := ends - starts).max() > MAX_ROW_BYTES:
        raise CorpusError(
            f"{path} line {sizes.argmax() + 1}: got {sizes.max()} bytes, expected at most "
            f"{MAX_ROW_BYTES} in a row; fix: one passage on each line"
        )
    offsets = np.append(starts[is_row], len(data)).astype(np.int64)
    digest = int.from_bytes(hasher.digest(), "big", signed=True)
    key = np.array([status.st_size, status.st_mtime_ns, digest], dtype=np.int64)
    _save(sidecar, np.concatenate([key, offsets]))
    return offsets, digest


def _save(sidecar: Path, values: Offsets) -> None:
    """Write the offsets; without write permission every start scans again."""
    try:
        with atomic_write(sidecar) as part, part.open("wb") as file:
            np.save(file, values, allow_pickle=False)
    except OSError as error:
        logger.warning("cannot store row offsets in %s (%s): every start will scan", sidecar, error)
