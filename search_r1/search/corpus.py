"""A jsonl corpus read by memory map: one row in one slice, nothing parsed before it is asked for.

Row offsets, a content hash and block checksums are computed in one pass, once, and kept beside the
corpus in `<corpus>.offsets.npy` and `<corpus>.checksums.json`. Searching lives in `backends`.
"""

import functools
import hashlib
import json
import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError

import numpy as np
import numpy.typing as npt
import orjson

from search_r1.search import checksums
from search_r1.search.checksums import Checksums, FileChecksums, sample_indices
from search_r1.search.errors import CorpusError
from search_r1.search.schema import Document
from verl.files import atomic_write, regular_file

logger = logging.getLogger(__name__)

Offsets = npt.NDArray[np.int64]
NEWLINE = 10
CHUNK_BYTES = 1 << 24
ROW_BYTES = 1 << 24
"""Longest row: an answer of several of these is more than any agent reads."""
ALL_ROWS, SAMPLED_ROWS = 1 << 14, 256
"""A corpus up to the first is read whole at each start, of a larger one so many rows by chance."""
OFFSETS = ".offsets.npy"
HEADER_LENGTH = 3
"""The sidecar's first integers: corpus size, modification time in ns, content hash."""
EXPECTED_ROW = 'expected a JSON object such as {"id": "7", "contents": "\\"Title\\"\\ntext"}'


@dataclass(frozen=True)
class Fingerprint:
    """What identifies a corpus: rows, bytes, and a 64-bit BLAKE2b hash of the content (hex)."""

    count: int
    size: int
    digest: str

    def __str__(self) -> str:
        return f"{self.count} documents, {self.size} bytes, hash {self.digest}"


class Corpus:
    """Documents by row number; safe to read from several threads."""

    def __init__(self, path: Path, data: mmap.mmap, offsets: Offsets, digest: int) -> None:
        """`offsets` (num_documents + 1,) are the rows' first bytes and the end of the file."""
        self.path = path
        self._data = data
        self._offsets = np.asarray(offsets)  # reads of single items are slow in a `np.memmap`
        self.fingerprint = Fingerprint(len(self), len(data), f"{digest & (2**64 - 1):016x}")

    @classmethod
    def open(cls, path: str | Path, *, whole: bool = False) -> "Corpus":
        """Map the file at `path`; scans it only if no valid sidecar exists.

        Raises CorpusError for a file that is missing or empty, IndexMismatch for one that is
        damaged: blocks of it, or the `whole`, are compared with its checksums.
        """
        path = Path(path)
        try:
            with regular_file(path).open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size == 0:
                    raise CorpusError(f"corpus {path} is empty; {EXPECTED_ROW} on each line")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            got = f"cannot be read ({error.strerror})" if path.exists() else "does not exist"
            raise CorpusError(
                f"corpus {path} {got}; expected jsonl: give --corpus_path, or example/corpus.jsonl"
            ) from error
        offsets, digest = _load(path, status, whole) or _scan(path, data, status)
        return cls(path, data, offsets, digest)

    def check_rows(self, *, whole: bool = False) -> None:
        """Raise CorpusError for a malformed row or a second id, in samples or the `whole`."""
        is_all = whole or len(self) <= ALL_ROWS
        rows = range(len(self)) if is_all else sample_indices(len(self), SAMPLED_ROWS)
        hashes = np.fromiter((hash(self[row].id) for row in rows), np.int64, len(rows))
        order = np.argsort(hashes, kind="stable")
        for place in np.flatnonzero(np.diff(hashes[order]) == 0):
            first, second = (self[rows[order[i]]].id for i in (place, place + 1))
            if first == second:
                raise CorpusError(
                    f"{self.path} rows {rows[order[place]] + 1} and {rows[order[place + 1]] + 1}: "
                    f"got the id {first!r} twice, expected ids that name one document each; "
                    "fix: drop or rename one, then build the index again"
                )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> Document:
        """The document of a row; raises CorpusError, with the row's number, if malformed."""
        return self._read(row, int(self._offsets[row]), int(self._offsets[row + 1]))

    def documents(self, rows: Sequence[int]) -> list[Document]:
        """The documents of `rows`, in that order."""
        places = np.asarray(rows, dtype=np.int64)
        starts, ends = self._offsets[places].tolist(), self._offsets[places + 1].tolist()
        return [self._read(*place) for place in zip(rows, starts, ends, strict=True)]

    def find(self, id: str) -> Document | None:
        """The document with this id, the first of several; None where there is none.

        Where ids are row numbers, as in wiki-18, this reads one row. Else the first call reads the
        whole corpus, for 16 bytes of memory a document.
        """
        if id.isascii() and id.isdigit() and len(id) < 19 and int(id) < len(self):
            document = self[int(id)]
            if document.id == id:
                return document
        hashes, rows = self._rows_by_id
        first = int(np.searchsorted(hashes, hash(id)))
        for place in range(first, len(rows)):
            if hashes[place] != hash(id):
                break
            document = self[int(rows[place])]
            if document.id == id:
                return document
        return None

    @functools.cached_property
    def _rows_by_id(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Hashes of all ids in ascending order, and the row of each."""
        hashes = np.fromiter((hash(document.id) for document in self), np.int64, len(self))
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order

    def _read(self, row: int, start: int, end: int) -> Document:
        try:
            return _parse(self._data[start:end])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            said = f"field {error} is missing" if isinstance(error, KeyError) else error
            raise CorpusError(
                f"{self.path} row {row + 1} (byte {start}): {said}, got "
                f"{self._data[start : min(end, start + 80)]!r}; {EXPECTED_ROW}: "
                "fix or drop this row, then build the index again"
            ) from error

    def __iter__(self) -> Iterator[Document]:
        return (self[row] for row in range(len(self)))


def _parse(line: bytes) -> Document:
    """One row; what orjson refuses has a second reading. Raises ValueError, KeyError, TypeError."""
    try:
        return Document.from_mapping(orjson.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError):
        # `NaN` in other fields, integers of any size and a byte-order mark are no mistakes
        row = json.loads(line.decode("utf-8-sig"))
    if not isinstance(row, dict):
        raise TypeError(f"the row is {type(row).__name__}, expected an object")
    document = Document.from_mapping(row)
    f"{document.id}{document.title}{document.text}{document.contents}".encode()
    return document


def _load(path: Path, status: os.stat_result, whole: bool) -> tuple[Offsets, int] | None:
    """Offsets and hash from the sidecar if it is the file's and has checksums."""
    sidecar = path.with_name(path.name + OFFSETS)
    key = [status.st_size, status.st_mtime_ns]
    if whole and checksums.path_for(path).exists():
        checksums.check(path, whole=True)
    try:
        known = np.load(sidecar, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except (ValueError, EOFError, OSError, TokenError) as error:
        logger.warning("%s is unreadable (%s): scanning again", sidecar, error)
        return None
    is_ours = isinstance(known, np.ndarray) and known.dtype == np.int64 and known.ndim == 1
    if not is_ours or known[: len(key)].tolist() != key:
        return None
    if not checksums.path_for(path).exists() and os.access(path.parent, os.W_OK):
        return None  # of an earlier version: this scan adds them
    checksums.check(path)
    return known[HEADER_LENGTH:], int(known[HEADER_LENGTH - 1])


def _scan(path: Path, data: mmap.mmap, status: os.stat_result) -> tuple[Offsets, int]:
    """Row offsets (num_documents + 1,) and hash in one pass, which are kept with checksums.

    Blank lines are no rows. Raises CorpusError for a file without rows, or with one too long.
    """
    hasher, breaks, crcs = hashlib.blake2b(digest_size=8), [], []
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        hasher.update(chunk)
        crcs.append(checksums.block_checksums(chunk))
        breaks.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == NEWLINE) + start)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.concatenate(breaks) + 1])
    ends = np.append(starts[1:], len(data))
    is_row = ends - starts > 1
    if not is_row.any():
        raise CorpusError(f"corpus {path} has blank lines only; {EXPECTED_ROW} on each line")
    if (sizes := ends - starts).max() > ROW_BYTES:
        raise CorpusError(
            f"{path} line {sizes.argmax() + 1}: got {sizes.max()} bytes, expected at most "
            f"{ROW_BYTES} in a row; fix: one passage on each line"
        )
    offsets = np.append(starts[is_row], len(data)).astype(np.int64)
    digest = int.from_bytes(hasher.digest(), "big", signed=True)
    key = np.array([status.st_size, status.st_mtime_ns, digest], dtype=np.int64)
    _save(path, np.concatenate([key, offsets]), FileChecksums(len(data), "".join(crcs)))
    return offsets, digest


def _save(path: Path, values: Offsets, sums: FileChecksums) -> None:
    """Write the sidecars; without the right to write, the scan repeats at each start."""
    sidecar = path.with_name(path.name + OFFSETS)
    try:
        with atomic_write(sidecar) as part:
            with part.open("wb") as file:
                np.save(file, values, allow_pickle=False)
            checksums.path_for(path).unlink(
                missing_ok=True
            )  # a kill leaves none rather than others
        Checksums({"": sums, OFFSETS: checksums.file_checksums(sidecar)}).save(path)
    except OSError as error:
        logger.warning("cannot keep row offsets in %s (%s): each start scans", sidecar, error)
