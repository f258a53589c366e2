"""A jsonl corpus read by memory map: one row in one slice, nothing parsed before it is asked for.

Row offsets and a content hash are computed in one pass, once, and kept beside the corpus in
`<corpus>.offsets.npy`. Searching lives in `retrievers`, not here.
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

import numpy as np
import numpy.typing as npt
import orjson

from search_r1.search.errors import CorpusError
from search_r1.search.schema import Document

logger = logging.getLogger(__name__)

Offsets = npt.NDArray[np.int64]
NEWLINE = 10
CHUNK_BYTES = 1 << 24
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
    def open(cls, path: str | Path) -> "Corpus":
        """Map the file at `path`; scans it only if no valid sidecar exists.

        Raises CorpusError for a file that is missing or empty.
        """
        path = Path(path)
        if not path.is_file():
            raise CorpusError(
                f"corpus {path} does not exist; expected a jsonl file: give --corpus_path, "
                "or take example/corpus.jsonl"
            )
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size == 0:
                raise CorpusError(f"corpus {path} is empty; {EXPECTED_ROW} on each line")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        offsets, digest = _load_or_scan(path, data, status)
        return cls(path, data, offsets, digest)

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
        first = int(np.searchsorted(hashes, _hash(id)))
        for place in range(first, len(rows)):
            if hashes[place] != _hash(id):
                break
            document = self[int(rows[place])]
            if document.id == id:
                return document
        return None

    @functools.cached_property
    def _rows_by_id(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Hashes of all ids in ascending order, and the row of each."""
        hashes = np.fromiter((_hash(document.id) for document in self), np.uint64, len(self))
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order

    def _read(self, row: int, start: int, end: int) -> Document:
        try:
            return _parse(self._data[start:end])
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"{self.path} row {row + 1} (byte {start}): {_describe(error)}, got "
                f"{self._data[start : min(end, start + 80)]!r}; {EXPECTED_ROW}: "
                "fix or drop this row, then build the index again"
            ) from error

    def __iter__(self) -> Iterator[Document]:
        return (self[row] for row in range(len(self)))


def _hash(id: str) -> np.uint64:
    digest = hashlib.blake2b(id.encode(), digest_size=8).digest()
    found: np.uint64 = np.uint64(int.from_bytes(digest, "little"))
    return found


def _parse(line: bytes) -> Document:
    """One row; raises ValueError, KeyError or TypeError for a malformed one.

    orjson refuses what could not be sent (lone surrogates); what it refuses has a second reading.
    """
    try:
        return Document.from_mapping(orjson.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError):
        return _parse_slowly(line)


def _parse_slowly(line: bytes) -> Document:
    """As `_parse`, but takes `NaN` in other fields, integers of any size and a byte-order mark."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError(f"the row is {type(row).__name__}, expected an object")
    document = Document.from_mapping(row)
    f"{document.id}{document.title}{document.text}{document.contents}".encode()
    return document


def _describe(error: Exception) -> str:
    return f"field {error} is missing" if isinstance(error, KeyError) else str(error)


def _load_or_scan(path: Path, data: mmap.mmap, status: os.stat_result) -> tuple[Offsets, int]:
    """Offsets and hash from the sidecar if it is the file's, else by a scan that writes it."""
    sidecar = path.with_name(path.name + ".offsets.npy")
    key = [status.st_size, status.st_mtime_ns]
    if sidecar.is_file():
        try:
            known = np.load(sidecar, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            logger.warning("%s is unreadable (%s): scanning again", sidecar, error)
        else:
            if known.dtype == np.int64 and known[: len(key)].tolist() == key:
                return known[HEADER_LENGTH:], int(known[HEADER_LENGTH - 1])
    offsets, digest = _scan(data)
    _save(sidecar, np.concatenate([np.array([*key, digest], dtype=np.int64), offsets]))
    return offsets, digest


def _scan(data: mmap.mmap) -> tuple[Offsets, int]:
    """Row offsets (num_documents + 1,) and content hash in one pass; blank lines are no rows."""
    hasher = hashlib.blake2b(digest_size=8)
    breaks = []
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        hasher.update(chunk)
        breaks.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == NEWLINE) + start)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.concatenate(breaks) + 1])
    ends = np.append(starts[1:], len(data))
    is_row = ends - starts > 1
    offsets = np.append(starts[is_row], len(data)).astype(np.int64)
    return offsets, int.from_bytes(hasher.digest(), "big", signed=True)


def _save(sidecar: Path, values: Offsets) -> None:
    """Write the sidecar atomically; without the right to write, the scan repeats at each start."""
    temporary = sidecar.with_name(f".{sidecar.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            np.save(file, values, allow_pickle=False)
        temporary.replace(sidecar)
    except OSError as error:
        logger.warning("cannot keep row offsets in %s (%s): each start scans", sidecar, error)
