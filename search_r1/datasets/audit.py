"""Audits questions against a corpus: `search-r1 data audit`, which adds columns to their files.

Each row gets `answer_kind`, `evidence` (`search_r1.datasets.evidence` says what they are) and
`evidence_rank`, the rank of the first document with an accepted answer among those that a search
for the question finds, or null. Training can choose rows by these columns (`data.filter`), and
`search-r1 evaluate table --by` compares evaluations by them.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from search_r1.datasets.command import AuditOptions
from search_r1.datasets.evidence import Evidence, Kind, evidence_of, kind_of, titles_by_answer
from search_r1.datasets.published import server_finder
from search_r1.datasets.question import Question, RecordLocation, read_question
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.errors import SearchError
from search_r1.retrieval.index.progress import progress
from search_r1.rewards.normalize import RULES
from verl.data.records import BadRow
from verl.data.rows import Row, check_row, read_records
from verl.errors import ConfigError, DataError, explain
from verl.files import atomic_write

logger = logging.getLogger(__name__)

COLUMNS = ("answer_kind", "evidence", "evidence_rank")
EVERY = "all rows"


@dataclass(frozen=True)
class Audited:
    """A question and where its evidence is."""

    question: Question
    kind: Kind
    evidence: Evidence
    rank: int | None
    """Rank of the first document with evidence, from 1."""

    @property
    def columns(self) -> Mapping[str, str | int | None]:
        """The row's new columns."""
        return dict(zip(COLUMNS, (str(self.kind), str(self.evidence), self.rank), strict=True))


def build(options: AuditOptions) -> int:
    """Audit all files, write them with the new columns, and print the shares."""
    targets = _targets(options)
    questions = {path: read_questions(path) for path in options.files}
    audited = audit([q for of_file in questions.values() for q in of_file], options)
    start = 0
    for path, target in targets.items():
        end = start + len(questions[path])
        write_columns(path, target, audited[start:end])
        start = end
    print(table(audited, options.topk))  # noqa: T201 - the command's result
    return 0


def _targets(options: AuditOptions) -> dict[Path, Path]:
    """Return the file to write for each file to read. Raises ConfigError before any work."""
    if not options.files:
        raise ConfigError(explain("FILE", "nothing", "parquet or jsonl", "name one or more"))
    targets = {path: options.local_dir / path.name for path in options.files}
    if len(set(targets.values())) < len(options.files):
        got = f"two files of one name among {', '.join(map(str, options.files))}"
        raise ConfigError(explain("FILE", got, "different names", "audit them one by one"))
    for path, target in targets.items():
        if target.resolve() == path.resolve():
            fix = "another --local_dir, which keeps the file as it was"
            raise ConfigError(explain("--local_dir", target, "a new file", fix))
    return targets


def read_questions(path: Path) -> list[Question]:
    """Read the rows of a question file, or raw questions. Raises DataError for a bad row."""
    questions = []
    for question in _questions(path):
        if isinstance(question, BadRow):
            raise DataError(question.problem)
        questions.append(question)
    return questions


def _questions(path: Path) -> Iterator[Question | BadRow]:
    for number, record in read_records(str(path)):
        location = RecordLocation(str(path), number, path.stem, "")
        if isinstance(record, dict) and {"prompt", "reward_model"} <= record.keys():
            yield _question_of_row(check_row(record, str(path), path.name, number), location)
        else:
            yield read_question(record, location)


def _question_of_row(row: Row | BadRow, location: RecordLocation) -> Question | BadRow:
    if isinstance(row, BadRow):
        return row
    text = row.extra_info.get("question")
    if not isinstance(text, str) or not text.strip():
        expected, fix = "the question alone, beside the prompt", "add a column question"
        return BadRow.at(location.file, row.number, "extra_info.question", text, expected, fix)
    return Question(row.uid, text, row.ground_truth, row.data_source, "", location)


def audit(questions: Sequence[Question], options: AuditOptions) -> list[Audited]:
    """Search for each question, and scan the corpus for the answers. Raises DataError, ToolError.

    The server must serve the same corpus, which is not checked beyond the documents' ids.
    """
    normalize = RULES[options.normalize]
    try:
        corpus = Corpus.open(options.corpus_path)
        found = server_finder(options.retriever_url, options.topk)(questions)
        _check_served(corpus, found, options)
        answers = {normalize(answer) for q in questions for answer in q.answers}
        num_processes = options.processes or os.cpu_count() or 1
        with progress("scan", "passages", len(corpus)) as report:
            titles = titles_by_answer(corpus, answers, options.normalize, num_processes, report)
    except SearchError as error:
        raise DataError(explain("--corpus_path", str(error), "a corpus", "correct it")) from error
    return [
        Audited(
            question,
            kind_of(question.text, question.answers, normalize),
            *evidence_of(question.answers, documents, titles, normalize),
        )
        for question, documents in zip(questions, found, strict=True)
    ]


def _check_served(corpus: Corpus, found: Sequence[Sequence[Any]], options: AuditOptions) -> None:
    """Raise DataError if the server's first document is not one of the corpus."""
    served = next((documents[0] for documents in found if documents), None)
    if served is None:
        got, fix = "no document for any question", "look what it serves: curl its /info"
        raise DataError(explain(options.retriever_url, got, "documents of the corpus", fix))
    if (own := corpus.find(served.id)) is None or own.contents != served.contents:
        got = f"document {served.id!r}, which {options.corpus_path} has not"
        fix = "give the corpus that the server was started with"
        raise DataError(explain(options.retriever_url, got, "documents of the corpus", fix))


def write_columns(path: Path, target: Path, audited: Sequence[Audited]) -> None:
    """Write the rows of a file with the new columns, in the same format."""
    columns = [row.columns for row in audited]
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as part:
        if path.suffix.lower() == ".parquet":
            rows = pyarrow.parquet.read_table(path)
            for name in COLUMNS:
                kind = pyarrow.int64() if name == COLUMNS[-1] else pyarrow.string()
                values = pyarrow.array([column[name] for column in columns], kind)
                if name in rows.column_names:
                    rows = rows.drop_columns([name])
                rows = rows.append_column(name, values)
            pyarrow.parquet.write_table(rows, part)
        else:
            with part.open("w", encoding="utf-8") as file:
                for (_, record), values in zip(_records(path), columns, strict=True):
                    file.write(json.dumps({**record, **values}, ensure_ascii=False) + "\n")
    logger.info("%s: %d rows", target, len(audited))


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, row in read_records(str(path)):
        assert isinstance(row, dict), "bad rows were refused when they were read"
        yield number, row


def table(audited: Sequence[Audited], topk: int) -> str:
    """Format the shares of the places by set, in percent; yes/no questions are counted apart."""
    places = [place for place in Evidence if place is not Evidence.UNKNOWN]
    titles = [f"top {topk}" if place is Evidence.TOPK else str(place) for place in places]
    heads = ["set", "questions", "yes/no", "comparison", *titles]
    names = sorted({row.question.data_source for row in audited})
    lines = [heads, ["---"] * len(heads)]
    for name in [*names, EVERY] if len(names) > 1 else names:
        rows = [row for row in audited if name in (row.question.data_source, EVERY)]
        kinds, found = Counter(r.kind for r in rows), Counter(r.evidence for r in rows)
        known = len(rows) - found[Evidence.UNKNOWN]
        shares = [f"{100 * found[place] / known:.1f}" if known else "–" for place in places]
        counts = [len(rows), kinds[Kind.YES_NO], kinds[Kind.COMPARISON]]
        lines.append([name, *map(str, counts), *shares])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
