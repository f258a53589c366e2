"""Writes folders and files of texts as a corpus of passages.

A passage of a document has as its id the path of its file within the folder and its number there; a
row keeps its id, with a number if it was cut. Changing or adding a file changes no id of another.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from search_r1.datasets.texts.cutting import Cutter
from search_r1.datasets.texts.files import TextFile, find_files
from search_r1.retrieval.errors import CorpusError
from search_r1.retrieval.index.progress import progress
from search_r1.retrieval.row_offsets import MAX_ROW_BYTES
from search_r1.retrieval.schema import Document
from verl.errors import explain
from verl.files import atomic_write

logger = logging.getLogger(__name__)

MAX_LISTED, MAX_PROBLEMS = 10, 100
"""Problems that a message lists, and after how many reading stops."""


@dataclass
class Problems:
    """What cannot be used of the texts: an error, or left out."""

    are_dropped: bool
    listed: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, message: str) -> None:
        self.count += 1
        if self.count <= MAX_LISTED:
            self.listed.append(message)
        if self.count >= MAX_PROBLEMS and not self.are_dropped:
            self.finish()

    def finish(self) -> None:
        """Raise CorpusError for the problems, or log that they were left out."""
        if not self.count:
            return
        further = self.count - len(self.listed)
        lines = [*self.listed, *([f"and {further} more"] if further else [])]
        if not self.are_dropped:
            header = f"{self.count} bad texts (--drop_bad_rows leaves them out):"
            raise CorpusError("\n  ".join([header, *lines]))
        logger.warning("left out %d bad texts:\n  %s", self.count, "\n  ".join(lines))


def write_corpus(
    paths: Sequence[Path], out: Path, cutter: Cutter, *, keep_rows: bool, drop_bad: bool
) -> int:
    """Write the passages of folders and files as jsonl; returns their number. Raises CorpusError.

    `keep_rows`: rows of tables become passages as they are. `drop_bad`: bad texts are left out.
    """
    files = [file for path in paths for file in find_files(path)]
    problems = Problems(drop_bad)
    ids: set[int] = set()  # hashes, since the ids of 21 million passages would be twice as large
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as part, part.open("wb") as target:
        with progress("read", "files", len(files)) as report:
            for number, file in enumerate(files, 1):
                for passage in read_passages(file, cutter, keep_rows):
                    line = passage if isinstance(passage, str) else _line(file, passage, ids)
                    if isinstance(line, str):
                        problems.add(line)
                    else:
                        target.write(line)
                report(number)
        problems.finish()
        if not ids:
            got, fix = "no passages", "give other texts"
            raise CorpusError(explain(str(out), got, "texts with words", fix))
    return len(ids)


def read_passages(file: TextFile, cutter: Cutter, keep_rows: bool) -> Iterator[Document | str]:
    """Yield the passages of a file, or messages of what cannot be used."""
    for found in file.read():
        if isinstance(found, str):
            yield found
            continue
        if file.is_table and keep_rows:
            yield found
            continue
        parts = cutter.cut(found.text)
        if file.is_table and len(parts) == 1:
            yield found
            continue
        for number, part in enumerate(parts):
            yield _passage(f"{found.id}#{number}", found.title, part)
        if not parts:
            where = f"{file.path}, {found.id}"
            yield explain(where, "nothing to cut", "a text with words", "drop it")


def _passage(id: str, title: str, text: str) -> Document:
    return Document.from_title(id, title, text) if title else Document(id, "", text, text)


def _line(file: TextFile, passage: Document, ids: set[int]) -> bytes | str:
    """Return the passage's row, or the message of what is wrong with it; adds its id to `ids`."""
    where = f"{file.path}, id {passage.id}"
    if (key := hash(passage.id)) in ids:
        fix = "drop or rename one of them; of folders with equal names, give the one above"
        return explain(where, "the id a second time", "an id of its own", fix)
    try:
        line = json.dumps(_row(passage), ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError as error:
        return explain(where, error, "text in UTF-8", "replace lone surrogates")
    if len(line) > MAX_ROW_BYTES:
        expected = f"at most {MAX_ROW_BYTES} bytes in a passage"
        return explain(where, f"{len(line)} bytes", expected, "leave out --keep_rows")
    ids.add(key)
    return line


def _row(passage: Document) -> dict[str, str]:
    """Return the row from which a corpus reads the passage, with its title on one line."""
    if not passage.title:
        return {"id": passage.id, "contents": " ".join(passage.contents.split())}
    title = " ".join(passage.title.split())
    if title != passage.title:
        passage = Document.from_title(passage.id, title, passage.text)
    return passage.to_row()
