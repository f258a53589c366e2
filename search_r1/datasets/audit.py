"""Audits questions against a corpus: `search-r1 data audit`, which adds columns to their files.

Each row gets `answer_kind`, `evidence` (`search_r1.datasets.evidence` says what they are) and
`evidence_rank`, the rank of the first document with an accepted answer among those that a search
for the question finds, or null. Training can choose rows by these columns (`data.filter`), and
`search-r1 evaluate table --by` compares evaluations by them.
"""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow

from search_r1.datasets.columns import Columns, by_set, read_questions, targets, write_columns
from search_r1.datasets.command import AuditOptions
from search_r1.datasets.evidence import Evidence, Kind, evidence_of, kind_of, titles_by_answer
from search_r1.datasets.published import server_finder
from search_r1.datasets.question import Question
from search_r1.plain import markdown_table
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.errors import SearchError
from search_r1.retrieval.index.progress import progress
from search_r1.rewards.normalize import RULES, normalize_accepted
from verl.errors import DataError, explain

COLUMNS = {"answer_kind": pyarrow.string(), "evidence": pyarrow.string(),
           "evidence_rank": pyarrow.int64()}  # fmt: skip
"""The new columns with their types."""


@dataclass(frozen=True)
class Audited:
    """A question and where its evidence is."""

    question: Question
    kind: Kind
    evidence: Evidence
    rank: int | None
    """Rank of the first document with evidence, from 1."""

    @property
    def columns(self) -> Columns:
        """The row's new columns."""
        return dict(zip(COLUMNS, (str(self.kind), str(self.evidence), self.rank), strict=True))


def build(options: AuditOptions) -> int:
    """Audit all files, write them with the new columns, and print the shares."""
    files = targets(options.files, options.local_dir)
    questions = {path: read_questions(path) for path in options.files}
    audited = audit([q for of_file in questions.values() for q in of_file], options)
    start = 0
    for path, target in files.items():
        end = start + len(questions[path])
        write_columns(path, target, [row.columns for row in audited[start:end]], COLUMNS)
        start = end
    sys.stdout.write(table(audited, options.topk))
    return 0


def audit(questions: Sequence[Question], options: AuditOptions) -> list[Audited]:
    """Search for each question, and scan the corpus for the answers. Raises DataError, ToolError.

    The server must serve the same corpus, which is checked by the first document that it finds.
    """
    normalize = RULES[options.normalize]
    try:
        corpus = Corpus.open(options.corpus_path)
        found = server_finder(options.retriever_url, options.topk)(questions)
        _check_served(corpus, found, options)
        answers = {normalize_accepted(a, normalize) for q in questions for a in q.answers}
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


def table(audited: Sequence[Audited], topk: int) -> str:
    """Format the shares of the places by set, in percent; yes/no questions are counted apart."""
    places = [place for place in Evidence if place is not Evidence.UNKNOWN]
    titles = [f"top {topk}" if place is Evidence.TOPK else str(place) for place in places]
    heads = ["set", "questions", "yes/no", "comparison", *titles]
    lines = []
    for name, numbers in by_set([row.question.data_source for row in audited]).items():
        rows = [audited[number] for number in numbers]
        kinds, found = Counter(r.kind for r in rows), Counter(r.evidence for r in rows)
        known = len(rows) - found[Evidence.UNKNOWN]
        shares = [f"{100 * found[place] / known:.1f}" if known else "–" for place in places]
        counts = [len(rows), kinds[Kind.YES_NO], kinds[Kind.COMPARISON]]
        lines.append([name, *map(str, counts), *shares])
    return markdown_table(heads, lines)
