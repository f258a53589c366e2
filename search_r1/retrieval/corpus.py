"""A memory-mapped jsonl corpus, whose rows are parsed when they are read.

Row offsets and a hash of the content are computed in a single pass and stored beside the corpus in
`<corpus>.offsets.npy`. Searching is in `engines`.
"""

import functools
import json
import logging
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import orjson

from search_r1.retrieval.errors import CorpusError
from search_r1.retrieval.schema import Document
from verl.file_kinds import HEAD_BYTES, describe_other
from verl.files import regular_file

if TYPE_CHECKING:
    from search_r1.retrieval.ids import Ids

logger = logging.getLogger(__name__)

Offsets = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]  # (num_documents,)
MAX_CHECKED_ROWS, SAMPLED_ROWS = 1 << 14, 256
"""At start, all rows of a corpus of up to MAX_CHECKED_ROWS are read, else SAMPLED_ROWS of them."""
SAMPLED = 64
"""Number of samples that are checked of an index at start."""
OFFSETS = ".offsets.npy"
HEADER_LENGTH = 3
"""Integers before the offsets in the offsets file: corpus size, mtime in ns, content hash."""
EXPECTED_ROW = 'expected a JSON object such as {"id": "7", "contents": "\\"Title\\"\\ntext"}'


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a corpus: number of rows, bytes, and 64-bit BLAKE2b hash of the content (hex)."""

    count: int
    size: int
    digest: str

    def __str__(self) -> str:
        return f"{self.count} documents, {self.size} bytes, hash {self.digest}"


class Corpus:
    """Documents by row number; thread-safe."""

    def __init__(self, path: Path, data: mmap.mmap, offsets: Offsets, digest: int) -> None:
        """`offsets` (num_documents + 1,): the first byte of each row, and the end of the file."""
        self.path = path
        self._data = data
        self._offsets = np.asarray(offsets)  # reading single items of an `np.memmap` is slow
        self.fingerprint = Fingerprint(len(self), len(data), f"{digest & (2**64 - 1):016x}")

    @classmethod
    def open(cls, path: str | Path, *, whole: bool = False) -> "Corpus":
        """Map the file, and scan it unless valid row offsets are stored beside it.

        `whole`: scan it in any case, so that its hash is that of the present content. Raises
        CorpusError for a missing or empty file.
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
        if problem := describe_other(path, data[:HEAD_BYTES], "passages"):
            raise CorpusError(f"corpus {path}: {problem}")
        stored = None if whole else _load(path, status)
        if stored is None:
            from search_r1.retrieval.row_offsets import scan  # noqa: PLC0415 - only at first

            stored = scan(path, data, status, path.with_name(path.name + OFFSETS))
        offsets, digest = stored
        return cls(path, data, offsets, digest)

    def check_rows(self, *, whole: bool = False) -> None:
        """Raise CorpusError for a malformed row or a repeated id, in a sample or in the `whole`."""
        is_all = whole or len(self) <= MAX_CHECKED_ROWS
        rows = sample_indices(len(self), SAMPLED_ROWS, whole=is_all)
        hashes = np.fromiter((hash(self[row].id) for row in rows), np.int64, len(rows))
        order = np.argsort(hashes, kind="stable")
        for i in np.flatnonzero(np.diff(hashes[order]) == 0):
            row, next_row = rows[order[i]], rows[order[i + 1]]
            if (id := self[row].id) == self[next_row].id:
                raise CorpusError(
                    f"{self.path} rows {row + 1} and {next_row + 1}: got the id {id!r} twice, "
                    "expected a unique id for each document; fix: drop or rename one of them, then "
                    "build the index again"
                )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> Document:
        """Return the document of a row; raises CorpusError, with the row number, if malformed."""
        return self._read(row, int(self._offsets[row]), int(self._offsets[row + 1]))

    def line(self, row: int) -> bytes:
        """Return a row as it is in the file."""
        return self._data[self._offsets[row] : self._offsets[row + 1]]

    def documents(self, rows: Sequence[int]) -> list[Document]:
        """Return the documents of `rows` in that order."""
        indices = np.asarray(rows, dtype=np.int64)
        starts, ends = self._offsets[indices].tolist(), self._offsets[indices + 1].tolist()
        return [self._read(*span) for span in zip(rows, starts, ends, strict=True)]

    def find(self, id: str) -> Document | None:
        """Return the first document with this id, or None."""
        return self._ids.find(id)

    @functools.cached_property
    def _ids(self) -> "Ids":
        from search_r1.retrieval.ids import Ids  # noqa: PLC0415 - few ask for a document

        return Ids(self)

    def _read(self, row: int, start: int, end: int) -> Document:
        try:
            return _parse(self._data[start:end], str(row))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"field {error} is missing" if isinstance(error, KeyError) else error
            raise CorpusError(
                f"{self.path} row {row + 1} (byte {start}): {problem}, got "
                f"{self._data[start : min(end, start + 80)]!r}; {EXPECTED_ROW}: "
                "fix or drop this row, then build the index again"
            ) from error

    def __iter__(self) -> Iterator[Document]:
        return (self[row] for row in range(len(self)))


def _parse(line: bytes, default_id: str) -> Document:
    """Parse a row; one without an id gets its number in the corpus, from 0."""
    try:
        return Document.from_mapping(orjson.loads(line), default_id)
    except (ValueError, KeyError, TypeError, AttributeError):
        # Valid, but refused by orjson: NaN in other fields, huge integers, a byte-order mark.
        row = json.loads(line.decode("utf-8-sig"))
    if not isinstance(row, dict):
        raise TypeError(f"the row is {type(row).__name__}, expected an object")
    document = Document.from_mapping(row, default_id)
    # Raises UnicodeEncodeError, a ValueError, for a lone surrogate.
    f"{document.id}{document.title}{document.text}{document.contents}".encode()
    return document


def sample_indices(count: int, max_samples: int = SAMPLED, *, whole: bool = False) -> Sequence[int]:
    """Return up to `max_samples` sorted indices of range(count), with both ends; or the `whole`."""
    if whole or count <= max_samples:
        return range(count)
    return sorted({0, count - 1, *random.sample(range(count), max_samples - 2)})


def _load(path: Path, status: os.stat_result) -> tuple[Offsets, int] | None:
    """Return the stored offsets and hash, or None if they are missing, outdated or unreadable."""
    sidecar = path.with_name(path.name + OFFSETS)
    key = [status.st_size, status.st_mtime_ns]
    try:
        stored = np.load(sidecar, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except (ValueError, EOFError, OSError, TokenError) as error:
        logger.warning("%s is unreadable (%s): scanning again", sidecar, error)
        return None
    is_valid = isinstance(stored, np.ndarray) and stored.dtype == np.int64 and stored.ndim == 1
    if not is_valid or stored[: len(key)].tolist() != key:
        return None
    return stored[HEADER_LENGTH:], int(stored[HEADER_LENGTH - 1])
