"""Questions become parquet files of rows: ids checked, bad rows told together, written whole.

The same questions give the same bytes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.fs
import pyarrow.parquet

from search_r1.datasets.question import Question, to_row
from search_r1.datasets.wording import Writer
from search_r1.search.schema import Document
from verl.data.rows import BadRow
from verl.errors import DataError, explain, first_line
from verl.files import whole_file

logger = logging.getLogger(__name__)

MOST_TOLD = 20
"""Bad rows that an error lists; the others are counted."""


def take_sound(found: Iterable[Question | BadRow], *, drop_bad: bool = False) -> list[Question]:
    """The questions, each id once. Raises DataError with the bad rows, unless they are dropped."""
    questions: dict[str, Question] = {}
    bad = []
    for one in found:
        if isinstance(one, BadRow):
            bad.append(one)
        elif one.id in questions:
            bad.append(_doubled(one, questions[one.id]))
        else:
            questions[one.id] = one
    if bad and not (drop_bad and questions):
        lines = [row.problem for row in bad[:MOST_TOLD]]
        lines += [f"and {len(bad) - MOST_TOLD} more"] if len(bad) > MOST_TOLD else []
        told = "\n  ".join([f"{len(bad)} bad rows (--drop_bad_rows leaves them out):", *lines])
        raise DataError(told)
    if bad:
        logger.warning("left out %d bad rows, the first: %s", len(bad), bad[0].problem)
    return list(questions.values())


def make_rows(
    questions: Sequence[Question],
    words: Writer,
    role: str,
    documents: Sequence[Sequence[Document]] | None = None,
    *,
    keep_extra: bool = False,
) -> list[dict[str, Any]]:
    """Rows in the order of the questions; `index` counts from 0 in each set, as the original's."""
    counts: Counter[str] = Counter()
    rows = []
    for number, question in enumerate(questions):
        prompt = words(question.text, documents[number] if documents else ())
        index = counts[question.data_source]
        counts[question.data_source] += 1
        rows.append(to_row(question, prompt, role, index, keep_extra=keep_extra))
    return rows


def write_rows(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows as parquet; the file appears whole or not at all. Raises DataError."""
    if not rows:
        raise DataError(explain(str(path), "no questions", "one or more", "give another source"))
    try:
        table = pyarrow.Table.from_pylist(rows)
    except pyarrow.ArrowException as error:
        got = str(error).split("\n")[0]
        fix = "make each further column of one type, or drop it"
        raise DataError(explain(str(path), got, "columns of one type", fix)) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part:
        pyarrow.parquet.write_table(table, part)
    counts = Counter(row["data_source"] for row in rows)
    told = ", ".join(f"{name} {count}" for name, count in counts.items())
    logger.info("%s: %d rows (%s)", path, len(rows), told)


def copy_folder(folder: Path, target: str) -> None:
    """Copy a folder to a path or a URI (hdfs://, s3://, gs://). Raises DataError."""
    try:
        address = target if "://" in target else Path(target).absolute().as_uri()
        system, path = pyarrow.fs.FileSystem.from_uri(address)
        system.create_dir(path, recursive=True)
        pyarrow.fs.copy_files(str(folder.absolute()), path, destination_filesystem=system)
    except (OSError, pyarrow.ArrowException) as error:
        got = f"{target} ({first_line(error)})"
        fix = f"copy {folder} by hand"
        raise DataError(explain("--hdfs_dir", got, "a folder that can be written", fix)) from error


def _doubled(one: Question, first: Question) -> BadRow:
    """The complaint about the second row of an id."""
    got = f"{one.id!r} as in {first.place.file}, row {first.place.number}"
    return BadRow.at(one.place.file, one.place.number, "id", got, "an id of its own")
