"""Questions of any source: read from raw records, checked, and written as rows of a parquet file.

A raw record has `question` and `golden_answers`, or `answers` or `answer`, which may be one text;
`id`, `data_source` and `split` where it knows them. The same questions give the same bytes.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.fs
import pyarrow.parquet

from search_r1.datasets.wording import PromptWriter
from search_r1.search.schema import Document
from verl.data.rows import BadRow, short_repr
from verl.errors import DataError, explain, first_line
from verl.files import atomic_write

ABILITY = "fact-reasoning"
ANSWER_COLUMNS = ("golden_answers", "answers", "answer")
OWN_COLUMNS = frozenset({*ANSWER_COLUMNS, "question", "id", "data_source", "split"})


@dataclass(frozen=True)
class RecordLocation:
    """Where a record stands, for its identity and for complaints."""

    file: str
    number: int
    """From 0 within the file."""
    data_source: str
    """The set, where the record does not name it."""
    split: str
    """The split it was taken from, where the record does not name it."""


@dataclass(frozen=True)
class Question:
    """A question that can be asked, with its accepted answers."""

    id: str
    """Unique over all sets: it starts with the set's name."""
    text: str
    """Without outer blanks, and with a question mark at its end."""
    answers: tuple[str, ...]
    data_source: str
    split: str
    """The split it was taken from."""
    place: RecordLocation
    extra: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Further plain values of the record; nested ones are left out."""

    @property
    def key(self) -> str:
        """The words of the question, alike for questions that differ in case or punctuation."""
        return " ".join(re.findall(r"\w+", self.text.lower()))


def read_question(record: Any, place: RecordLocation) -> Question | BadRow:
    """A raw record as a question, or what is wrong with it."""

    def refuse(part: str, got: object, expected: str) -> BadRow:
        return BadRow.at(place.file, place.number, part, short_repr(got), expected)

    if isinstance(record, BadRow):
        return record
    if not isinstance(record, dict):
        return refuse("", record, "an object")
    text = record.get("question")
    if not isinstance(text, str) or not text.strip():
        return refuse("question", text, "a text that is not empty")
    column = next((name for name in ANSWER_COLUMNS if name in record), ANSWER_COLUMNS[0])
    answers = read_answers(record.get(column))
    if not answers:
        return refuse(column, record.get(column), "an answer, or a list of answers, as text")
    source = str(record.get("data_source") or place.data_source)
    split = str(record.get("split") or place.split)
    for part, word in (("data_source", source), ("split", split)):
        if not word.isprintable():
            return refuse(part, word, "a printable name")
    if split and not re.fullmatch(r"\w[\w.-]*", split):  # a file is named so
        return refuse("split", split, "letters, digits and . _ - alone")
    own = record.get("id")
    number = f"{split}_{place.number}" if split else str(place.number)
    name = str(own) if own not in (None, "") else number
    name = name if name.startswith(f"{source}_") else f"{source}_{name}"
    extra = {
        key: value
        for key, value in record.items()
        if key not in OWN_COLUMNS and isinstance(value, str | int | float | bool)
    }
    return Question(name, as_question(text), answers, source, split, place, extra)


def as_question(text: str) -> str:
    """The text without outer blanks and with a question mark at its end, as in the original."""
    text = text.strip()
    return text if text.endswith("?") else text + "?"


def read_answers(value: Any) -> tuple[str, ...]:
    """The accepted answers, empty ones left out; () where the value is no text or list of texts."""
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, Sequence) or not all(isinstance(one, str) for one in answers):
        return ()
    return tuple(one for one in answers if one.strip())


def to_row(
    question: Question, prompt: str, role: str, index: int, *, keep_extra: bool = False
) -> dict[str, Any]:
    """The row of a question file; `role` (train, test) and `index` are the original's."""
    more = question.extra if keep_extra else {}
    return {
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.answers),
        "data_source": question.data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ABILITY,
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answers)}},
        "extra_info": {
            **more,
            "split": role,
            "index": index,
            "id": question.id,
            "question": question.text,
            "source_split": question.split,
        },
    }


logger = logging.getLogger(__name__)

MOST_TOLD = 20
"""Bad rows that an error lists; the others are counted."""


def valid_questions(
    found: Iterable[Question | BadRow], *, drop_bad: bool = False
) -> list[Question]:
    """The questions, each id once. Raises DataError with the bad rows, unless they are dropped."""
    questions: dict[str, Question] = {}
    bad = []
    for one in found:
        if isinstance(one, BadRow):
            bad.append(one)
        elif one.id in questions:
            first, at = questions[one.id].place, one.place
            got = f"{one.id!r} as in {first.file}, row {first.number}"
            bad.append(BadRow.at(at.file, at.number, "id", got, "an id of its own"))
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
    words: PromptWriter,
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
    with atomic_write(path) as part:
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
