"""Recorded search results in a jsonl file: written by `--record`, served by the backend `replay`.

The first line holds the format and the backend's facts; each further line is one query with its
hits and the search time. A killed server leaves at most one incomplete last line: readers skip it,
and the next Recorder removes it. Numbers are read back exactly.
"""

import contextlib
import fcntl
import json
import logging
import math
import os
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from search_r1.retrieval.engines.base import fingerprint
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.schema import Document, Hit
from verl.files import MAX_CHARS, LineWriter, regular_file

logger = logging.getLogger(__name__)

FORMAT = "search-r1-record"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Record:
    """The hits of a query for one `k`, and the search time in seconds."""

    query: str
    k: int
    hits: list[Hit]
    seconds: float


class Recorder:
    """Appends records to a file; thread-safe. Only one process can use a file at a time."""

    def __init__(self, path: str | Path, facts: Mapping[str, Any]) -> None:
        """Create the file, or continue it if its backend has equal `facts`; raises SetupError."""
        self._path = Path(path)
        self._lock = threading.Lock()
        with contextlib.ExitStack() as stack:
            try:
                self._file = stack.enter_context(self._path.open("ab+"))
                self._lines = stack.enter_context(contextlib.closing(LineWriter(self._path)))
                self._recorded_keys = self._open_record(facts)
            except BlockingIOError as error:
                raise SetupError(
                    f"{path} is being recorded by another server; give each server its own "
                    "--record file"
                ) from error
            except OSError as error:
                raise SetupError(
                    f"cannot record into {path} ({error}); expected a file in a folder that exists "
                    "and may be written, on a disk with free space"
                ) from error
            stack.pop_all()

    def write(self, records: Sequence[Record]) -> None:
        """Append the records whose query and k are not in the file yet."""
        with self._lock:
            new: dict[tuple[str, int], bytes] = {}
            for record in records:
                if (key := (record.query, record.k)) not in self._recorded_keys:
                    new.setdefault(key, to_line(record))
            self._lines.append_bytes(b"".join(new.values()))
            self._recorded_keys |= new.keys()

    def close(self) -> None:
        with self._lock:
            self._lines.close()
            self._file.close()

    def _open_record(self, facts: Mapping[str, Any]) -> set[tuple[str, int]]:
        """Write or check the header; return the (query, k) pairs that are already recorded."""
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed
        text = json.dumps(facts)
        facts = json.loads(text)  # as a reader gets them: lists instead of tuples
        if _remove_partial_line(self._file) == 0:
            header = {"format": FORMAT, "version": VERSION, "facts": facts}
            self._lines.append_bytes(_to_json_line({**header, "fingerprint": fingerprint(facts)}))
            return set()
        recorded = read_facts(self._path)
        if fingerprint(recorded) != fingerprint(facts):
            raise SetupError(
                f"{self._path} is a record of another backend: {json.dumps(recorded)}, but this "
                f"one is {text}; record into a new file, or serve the backend of that record"
            )
        return {(row["query"], row["k"]) for _, row in read_rows(self._path)}


def read_facts(path: str | Path) -> dict[str, Any]:
    """Return the recorded backend's info(); raises SetupError if the file is not a record."""
    path = Path(path)
    try:
        with regular_file(path).open("rb") as file:
            line = file.readline(MAX_CHARS)
        header = json.loads(line) if line.endswith(b"\n") else None
    except OSError as error:
        raise SetupError(
            f"record {path} cannot be read ({error}); expected a file of --record"
        ) from error
    except (ValueError, RecursionError):
        header = None
    if (
        not isinstance(header, dict)
        or header.get("format") != FORMAT
        or not isinstance(header.get("facts"), dict)
    ):
        raise SetupError(
            f"{path} is not a record: its first line is {line[:80]!r}; expected a file of --record"
        )
    if header.get("version") != VERSION:
        raise SetupError(
            f"record {path} has version {header.get('version')}, expected {VERSION}; record again, "
            "or serve it with the release that wrote it"
        )
    facts: dict[str, Any] = header["facts"]
    return facts


def read_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield byte offset and fields of every complete line; raises SetupError."""
    path = Path(path)
    read_facts(path)
    with path.open("rb") as file:
        offset = len(file.readline())
        for number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                logger.warning("%s: skipped its incomplete last line", path)
                return
            try:
                row = json.loads(line)
                to_record(row)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
                raise SetupError(
                    f"{path} line {number} is not a record ({reason}), expected one, got "
                    f"{line[:80]!r}; drop this line, or record again"
                ) from error
            yield offset, row
            offset += len(line)


def to_record(row: Mapping[str, Any]) -> Record:
    """Return the record of a line; raises KeyError, TypeError, AttributeError or ValueError."""
    hits = [Hit(Document.from_mapping(item), item["score"]) for item in row["hits"]]
    numbers = [row["seconds"], *(hit.score for hit in hits)]
    if type(row["query"]) is not str or type(row["k"]) is not int or row["k"] < 1:
        raise TypeError("query or k has another type")
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise ValueError("seconds or a score is no finite number")
    return Record(row["query"], row["k"], hits, row["seconds"])


def to_line(record: Record) -> bytes:
    """Encode a record as one line; title and text are left out if they follow from `contents`."""
    hits = []
    for hit in record.hits:
        document = hit.document
        item = {"id": document.id, "contents": document.contents, "score": float(hit.score)}
        if Document.from_contents(document.id, document.contents) != document:
            item |= {"title": document.title, "text": document.text}
        hits.append(item)
    row = {"query": record.query, "k": record.k, "seconds": float(record.seconds), "hits": hits}
    return _to_json_line(row)


def _to_json_line(row: Mapping[str, Any]) -> bytes:
    # ASCII, so that no character of a query or document is a line break.
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def _remove_partial_line(file: BinaryIO) -> int:
    """Remove the bytes after the last newline; return the size of the remaining file."""
    size = end = file.seek(0, os.SEEK_END)
    tail = b""
    while end > 0 and b"\n" not in tail:
        start = max(0, end - (1 << 16))
        file.seek(start)
        tail = file.read(end - start)
        end = start
    kept = end + tail.rfind(b"\n") + 1
    if kept < size:
        logger.warning("%s: removed %d bytes of an incomplete line", file.name, size - kept)
        file.truncate(kept)
    file.seek(0, os.SEEK_END)
    return kept
