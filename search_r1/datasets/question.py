"""Reads and checks questions from raw records and writes them as rows of a parquet file.

A raw record has `question`, one of `golden_answers`, `answers` and `answer` (a list or one text),
and optionally `id`, `data_source` and `split`. Equal questions give a file with equal bytes.
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
from search_r1.retrieval.schema import Document
from verl.data.records import MAX_QUOTE, BadRow, short_repr
from verl.data.values import MISSING_CELLS, Unreadable, parse_structure, read_answers
from verl.errors import DataError, explain, first_line, shortened
from verl.files import atomic_write

logger = logging.getLogger(__name__)

ABILITY = "fact-reasoning"
ANSWER_COLUMNS = ("golden_answers", "answers", "answer", "possible_answers")
"""Columns of answers; the first that a row has is read."""
ALIAS_COLUMNS = ("answer_aliases", "aliases", "answer_alias")
"""Columns of further accepted answers, which are added (MuSiQue and others)."""
READ_COLUMNS = frozenset(
    {*ANSWER_COLUMNS, *ALIAS_COLUMNS, "question", "id", "data_source", "split"}
)
"""Columns that are read; all others are `Question.extra`."""
QUESTION_SYNONYMS = ("problem", "query", "question_text", "prompt", "input", "instruction", "q")
ANSWER_SYNONYMS = ("final answer", "final_answer", "correct answer", "correct_answer", "target",
                   "label", "output", "response", "gold", "solution", "a")  # fmt: skip
"""Other names of these columns, which an error says to rename: their content may be another."""
_WORKED = re.compile(r"^#### |\\boxed\b", re.MULTILINE)
"""Matches what marks the final answer within a worked solution (GSM8K, MATH)."""
AS_TEXT = "write each answer as text, or drop the row"
MAX_LISTED = 20
"""Maximum number of bad rows that an error lists; further rows are counted."""


_ENDS_SENTENCE = re.compile(
    "(?:[?\uff1f\ufe56\ufe16\u061f\u037e\u203d\u2047-\u2049\u2e2e\u1367\ua60f\ua6f7\u1945\u2cfa\u2cfb"
    "!.\uff01\u3002\uff0e\u2026\u0964\u06d4]"
    "|[\u0370-\u03ff\u1f00-\u1fff];"  # a Greek question mark as a keyboard or NFC writes it
    "|\u055e[\u0530-\u058f]*)"  # the Armenian one stands in the last word
    "[\"'\u2018-\u201f\u00bb\u203a\u300d\u300f\u300b\u3009)\\]}\uff09\\s]*\\Z"
)
"""A text that is a whole sentence, with closing quotes and brackets."""


@dataclass(frozen=True)
class RecordLocation:
    """The location of a record, for its id and for error messages."""

    file: str
    number: int
    """Row number in the file, from 0."""
    data_source: str
    """Name of the set, if the record has none."""
    split: str
    """Split, if the record has none."""


@dataclass(frozen=True)
class Question:
    """A valid question with its accepted answers."""

    id: str
    """Unique over all sets, since it starts with the name of the set."""
    text: str
    """Without outer white space, and with a question mark at its end."""
    answers: tuple[str, ...]
    data_source: str
    split: str
    """Split of the source."""
    location: RecordLocation
    extra: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Further scalar values of the record; nested values are dropped."""

    @property
    def key(self) -> str:
        """The words of the question, without case and punctuation."""
        return " ".join(re.findall(r"\w+", self.text.lower()))


def read_question(record: Any, location: RecordLocation) -> Question | BadRow:
    """Return the question of a raw record, or the problem with it as a `BadRow`."""

    def bad_row(part: str, got: object, expected: str, fix: str = "") -> BadRow:
        return BadRow.at(location.file, location.number, part, short_repr(got), expected, fix)

    if isinstance(record, BadRow):
        return record
    if not isinstance(record, dict):
        return bad_row("", record, "an object")
    try:
        record = dict(zip(known_names(record), record.values(), strict=True))
    except ValueError as error:
        return BadRow.at(location.file, location.number, "", str(error), "each column once")
    text = record.get("question")
    if "question" not in record:
        got, expected, fix = missing_question(record)
        return BadRow.at(location.file, location.number, "", got, expected, fix)
    if not isinstance(text, str) or text.strip() in MISSING_CELLS or _is_list(text):
        return bad_row("question", text, "a text that is not empty, and no list")
    column = next((name for name in ANSWER_COLUMNS if name in record), ANSWER_COLUMNS[0])
    if record.get("answerable") in (False, "false", "False") or record.get("is_impossible") is True:
        return bad_row("answerable", False, "a question that has an answer")
    try:
        answers = read_answers(record.get(column), numbers=True)
        for name in ALIAS_COLUMNS if answers else ():
            answers += read_answers(record.get(name), numbers=True)
    except Unreadable as error:
        return bad_row(column, record.get(column), error.expected, AS_TEXT)
    if not answers and column not in record:
        got, expected, fix = missing_answer(record)
        return BadRow.at(location.file, location.number, "", got, expected, fix)
    if not answers:
        return bad_row(column, record.get(column), "an answer, or a list of answers, as text")
    answers = tuple(dict.fromkeys(answers))
    worked = next((answer for answer in answers if _WORKED.search(answer)), None)
    if worked is not None:
        expected = "the final answer alone, not a worked solution"
        return bad_row(column, worked, expected, "write what stands after #### or in \\boxed")
    source = str(record.get("data_source") or location.data_source)
    split = str(record.get("split") or location.split)
    for part, name in (("data_source", source), ("split", split)):
        if not name.isprintable():
            return bad_row(part, name, "a printable name")
    if split and not re.fullmatch(r"\w[\w.-]*", split):  # it becomes a file name
        return bad_row("split", split, "letters, digits and . _ - only")
    record_id = record.get("id")
    if record_id in (None, ""):
        record_id = f"{split}_{location.number}" if split else location.number
    question_id = str(record_id)
    if not question_id.startswith(f"{source}_"):
        question_id = f"{source}_{question_id}"
    extra = {
        key: value
        for key, value in record.items()
        if key not in READ_COLUMNS and isinstance(value, str | int | float | bool)
    }
    return Question(question_id, as_question(text), answers, source, split, location, extra)


def _is_list(text: str) -> bool:
    """Whether a question is a whole list or object saved as text; it may begin with one."""
    try:
        return parse_structure(text) is not None
    except Unreadable:
        return False


def known_names(names: Iterable[str]) -> list[str]:
    """Return the columns' names, those that are read as they are known, such as `Question`.

    Raises ValueError if two columns have one name, as `answer` and `Answer`, or `answer` and
    `answer.1`, which pandas writes for the second of two.
    """
    result: list[str] = []
    for written in names:
        name = str(written).strip()
        known = re.sub(r"\.\d+\Z", "", name).lower()
        if known not in READ_COLUMNS:
            known = name
        if known and known in result:
            raise ValueError(f"the column {short_repr(known)} twice, once as {short_repr(written)}")
        result.append(known)
    return result


def missing_question(names: Iterable[str]) -> tuple[str, str, str]:
    """Return got, expected and fix of an error about a file without a column of questions."""
    return _missing_column(names, "question", QUESTION_SYNONYMS)


def missing_answer(names: Iterable[str]) -> tuple[str, str, str]:
    """Return got, expected and fix of an error about a file without a column of answers."""
    return _missing_column(names, "answer", ANSWER_SYNONYMS)


def _missing_column(
    names: Iterable[str], column: str, synonyms: Sequence[str]
) -> tuple[str, str, str]:
    names = [str(name) for name in names]
    similar = next((name for name in names if name.strip().lower() in synonyms), None)
    fix = f"name the column of the {column}s {column} (in a csv, in its first line)"
    if similar is not None:
        fix = f"rename the column {similar} to {column}"
        if similar.lower() == "solution":
            fix = "write the final answer of each solution alone into a column answer"
    elif "messages" in names:
        fix = "write the user's text as question and the assistant's as answer"
    got = f"columns {shortened(', '.join(names) or '(none)', MAX_QUOTE - 20)}"
    return got, f"a column {column}", fix


def as_question(text: str) -> str:
    """Return the text without outer white space, with a question mark unless it ends a sentence.

    The question marks of all scripts count, also before closing quotes; a text that ends in a full
    stop or an exclamation mark is unchanged.
    """
    text = text.strip()
    return text if _ENDS_SENTENCE.search(text) else text + "?"


def to_row(
    question: Question, prompt: str, role: str, index: int, *, keep_extra: bool = False
) -> dict[str, Any]:
    """Return the row of a question file, with `role` and `index` in `extra_info`."""
    return {
        "id": question.id,
        "question": question.text,
        "golden_answers": list(question.answers),
        "data_source": question.data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ABILITY,
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.answers)}},
        "extra_info": {
            **(question.extra if keep_extra else {}),
            "split": role,
            "index": index,
            "id": question.id,
            "question": question.text,
            "source_split": question.split,
        },
    }


def valid_questions(
    results: Iterable[Question | BadRow], *, drop_bad: bool = False
) -> list[Question]:
    """Return the questions; a repeated id is a bad row too.

    Raises DataError, which lists the bad rows, unless they are dropped and questions remain.
    """
    questions: dict[str, Question] = {}
    bad = []
    for result in results:
        if isinstance(result, BadRow):
            bad.append(result)
        elif result.id in questions:
            first, second = questions[result.id].location, result.location
            got = f"{result.id!r} as in {first.file}, row {first.number}"
            bad.append(BadRow.at(second.file, second.number, "id", got, "a unique id"))
        else:
            questions[result.id] = result
    if bad and not (drop_bad and questions):
        lines = [row.problem for row in bad[:MAX_LISTED]]
        lines += [f"and {len(bad) - MAX_LISTED} more"] if len(bad) > MAX_LISTED else []
        header = f"{len(bad)} bad rows (--drop_bad_rows skips them):"
        raise DataError("\n  ".join([header, *lines]))
    if bad:
        logger.warning("skipped %d bad rows, the first: %s", len(bad), bad[0].problem)
    return list(questions.values())


def make_rows(
    questions: Sequence[Question],
    write_prompt: PromptWriter,
    role: str,
    documents: Sequence[Sequence[Document]] | None = None,
    *,
    keep_extra: bool = False,
) -> list[dict[str, Any]]:
    """Return rows in the order of the questions; `index` counts from 0 in each set.

    `documents`: those found for each question, if the prompts contain documents.
    """
    counts: Counter[str] = Counter()
    rows = []
    for number, question in enumerate(questions):
        prompt = write_prompt(question.text, documents[number] if documents else ())
        index = counts[question.data_source]
        counts[question.data_source] += 1
        rows.append(to_row(question, prompt, role, index, keep_extra=keep_extra))
    return rows


def write_rows(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows as parquet, atomically. Raises DataError."""
    if not rows:
        raise DataError(explain(str(path), "no questions", "one or more", "give another source"))
    try:
        table = pyarrow.Table.from_pylist(rows)
    except (pyarrow.ArrowException, OverflowError) as error:  # integers over 63 bits
        got = str(error).split("\n")[0]
        fix = "give each further column one type, numbers over 2**63 as text, or drop it"
        raise DataError(explain(str(path), got, "columns of one type", fix)) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as part:
        pyarrow.parquet.write_table(table, part)
    counts = Counter(row["data_source"] for row in rows)
    sources = ", ".join(f"{name} {count}" for name, count in counts.items())
    logger.info("%s: %d rows (%s)", path, len(rows), sources)


def copy_folder(folder: Path, target: str) -> None:
    """Copy a folder to a path or a URI (hdfs://, s3://, gs://). Raises DataError."""
    try:
        address = target if "://" in target else Path(target).absolute().as_uri()
        system, path = pyarrow.fs.FileSystem.from_uri(address)
        system.create_dir(path, recursive=True)
        pyarrow.fs.copy_files(str(folder.absolute()), path, destination_filesystem=system)
    except (OSError, pyarrow.ArrowException) as error:
        got = f"{target} ({first_line(error)})"
        fix = f"copy {folder} yourself"
        raise DataError(explain("--hdfs_dir", got, "a folder that can be written", fix)) from error
