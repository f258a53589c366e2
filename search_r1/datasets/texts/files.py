"""Finds the files of a corpus in folders, and reads the texts of each by its suffix."""

import csv
import gzip
import logging
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from search_r1.datasets.texts import documents, rows
from search_r1.retrieval.errors import CorpusError
from search_r1.retrieval.schema import Document
from verl.data.records import BadRow
from verl.errors import UserError, explain, first_line
from verl.files import regular_file

logger = logging.getLogger(__name__)

SUFFIXES = (*documents.READERS, *rows.READERS)
IN_FOLDERS = tuple(suffix for suffix in SUFFIXES if suffix != ".json")
"""What is read of a folder; its .json files are more often settings than rows."""


@dataclass(frozen=True)
class TextFile:
    """A file of one text, or of a text in each row."""

    path: Path
    name: str
    """Its path within the folder that was given."""

    @property
    def suffix(self) -> str:
        name = self.path.name.lower()
        return Path(name.removesuffix(".gz")).suffix

    @property
    def is_table(self) -> bool:
        return self.suffix in rows.READERS

    def read(self) -> Iterator[Document | str]:
        """Yield the texts, or messages of what cannot be used."""
        try:
            with self._open() as stream:
                if not self.is_table:
                    title, text = documents.read_document(self.suffix, stream.read())
                    title = title or documents.name_title(self.name)
                    yield Document.from_title(self.name, title, text)
                    return
                for found in rows.read_rows(self.path, self.name, self.suffix, stream):
                    yield found.problem if isinstance(found, BadRow) else found
        except documents.Unreadable as error:
            yield explain(str(self.path), *error.parts)
        except UserError as error:
            yield str(error)
        except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
            expected = f"a whole {self.suffix} file in UTF-8"
            fix = "download or convert it again (iconv -f latin1 -t utf-8)"
            yield explain(str(self.path), first_line(error), expected, fix)

    def _open(self) -> BinaryIO:
        path = regular_file(self.path)
        return gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def find_files(path: Path) -> list[TextFile]:
    """Return a file, or the files of a folder and its subfolders by path. Raises CorpusError.

    Of a folder in BEIR's layout, which has questions and judgements as well, it is the corpus.
    """
    if not path.is_dir():
        file = TextFile(path, path.name)
        if not path.exists() or file.suffix not in SUFFIXES:
            got = f"a {path.suffix or 'nameless'} file" if path.exists() else "nothing"
            expected = f"a folder, or a file of {', '.join(SUFFIXES)}, also with .gz"
            raise CorpusError(explain(str(path), got, expected, "correct the path, or convert it"))
        return [file]
    found = sorted(file for file in path.rglob("*") if file.is_file())
    files = [TextFile(file, file.relative_to(path).as_posix()) for file in found]
    if (path / "qrels").is_dir() or any(
        (path / f"queries.jsonl{gz}").exists() for gz in ("", ".gz")
    ):
        files = [file for file in files if file.name in ("corpus.jsonl", "corpus.jsonl.gz")]
        logger.info("%s has the layout of BEIR: only its corpus is read", path)
    read = [file for file in files if file.suffix in IN_FOLDERS]
    if left := Counter(file.suffix for file in files if file.suffix not in IN_FOLDERS):
        listed = ", ".join(
            f"{count} {suffix or 'without suffix'}" for suffix, count in left.items()
        )
        logger.warning("%s: not read: %s", path, listed)
    if not read:
        expected = f"a folder with files of {', '.join(IN_FOLDERS)}"
        raise CorpusError(explain(str(path), "none", expected, "correct the path, or convert them"))
    return read
