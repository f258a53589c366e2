"""Whether a run's retrieval server serves what the run's questions need: asked before it starts.

A server may answer, and still serve another corpus, empty passages, or the same ones for any query.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from search_r1.agent.question import question_of
from search_r1.agent.search import count_blank, holds_answer
from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.errors import RetrieverRefused
from search_r1.retrieval.schema import Document
from search_r1.rewards.normalize import RULES, contains_answer
from verl.config.data import MISSING, DataConfig
from verl.data.records import BadRow
from verl.data.rows import file_list, scan_rows
from verl.errors import DataError, ToolRefused, explain

logger = logging.getLogger(__name__)

MAX_ROWS = 1024
"""Rows at the start of each question file that are looked at."""
MAX_QUESTIONS, MIN_QUESTIONS = 32, 16
"""Questions of a data source that are asked; with fewer, nothing is concluded from answers."""
MIN_QUERIES = 4
"""Distinct questions from which something is concluded of the documents themselves."""
LOW_SHARE = 1 / 16
"""Share of questions whose documents hold an answer, at or below which the corpus is in doubt."""
NAMED_SHARE = 1 / 6
"""Share of questions that name the title of a document found, from which on the corpus fits them,
even if no document holds an answer: such questions need a second search."""
TOY_DOCUMENTS = 1000
"""A corpus of fewer documents in which answers are that rare is refused."""
IN_ANY_TEXT = ("yes", "no")
MAX_ANSWER_WORDS = 8
"""A longer answer stands in no document word for word."""
CONTROLS = ("none", "empty", "random", "oracle")
"""Control retrievers, used for diagnostics instead of a real search."""
CORPUS_FIX = (
    "start it with their corpus, as CORPUS_PATH=data/wiki-18/wiki-18.jsonl, unless each of them "
    "needs what an earlier search finds"
)
NOTHING_FIX = (
    "serve the corpus of the questions, or retriever.url=empty for a run without documents"
)


@dataclass(frozen=True)
class Asked:
    """A question of the run, and its accepted answers."""

    source: str
    question: str
    accepted: tuple[str, ...]


def questions_of(data: DataConfig) -> list[Asked]:
    """Return some questions of each data source of a run, validation first, each once.

    Files that cannot be read have none: they are reported where they are needed.
    """
    found: dict[str, Asked] = {}
    counts: Counter[str] = Counter()
    for files in (data.val_files, data.train_files):
        if not files or files == MISSING:
            continue
        for file in file_list(files):
            try:
                rows = list(islice(scan_rows([file]), MAX_ROWS))
            except DataError:
                continue
            for row in rows:
                if isinstance(row, BadRow) or counts[row.data_source] >= MAX_QUESTIONS:
                    continue
                question = question_of(row)
                accepted = tuple(filter(_can_stand_in_documents, row.ground_truth))
                if question and accepted and question not in found:
                    found[question] = Asked(row.data_source, question, accepted)
                    counts[row.data_source] += 1
    return list(found.values())


def _can_stand_in_documents(answer: str) -> bool:
    return answer.lower() not in IN_ANY_TEXT and len(answer.split()) <= MAX_ANSWER_WORDS


def mixture_problems(label: str, served: Mapping[str, Mapping[str, str]]) -> Iterator[ToolRefused]:
    """Yield an error if addresses serve different corpora; warn of different indexes and encoders.

    Any of them may answer any search. `served`: their fingerprints, of which some may be unknown.
    """
    for part in sorted({part for parts in served.values() for part in parts}):
        first, *others = [url for url, parts in served.items() if part in parts]
        other = next((u for u in others if served[u][part] != served[first][part]), None)
        if other is None:
            continue
        got = f"another {part} at {other} than at {first}"
        expected = "the same, as any address may answer any search"
        fix = "serve one index at each of them"
        problem = explain(f"retriever.url={label}", got, expected, fix)
        if part == "corpus":
            yield ToolRefused(problem)
        else:
            logger.warning(problem)


async def examine(
    client: RetrievalClient, where: str, asked: Sequence[Asked], rule: str
) -> list[str]:
    """Ask questions of the run; return what is odd about the documents, for warnings.

    `rule`: that by which answers are compared. Raises ToolRefused for documents that no run can
    learn from, and the client's errors.
    """
    if len(asked) < MIN_QUERIES:
        return []
    try:
        info = await client.info()
    except RetrieverRefused:
        info = {}  # other implementations have no /info
    if info.get("retriever") in CONTROLS:
        return []
    found = await asyncio.gather(*(client.search(one.question) for one in asked))
    refuse_nothing(where, found, info)
    odd = list(odd_sources(where, asked, found, rule, info))
    if odd and info.get("num_documents", TOY_DOCUMENTS) < TOY_DOCUMENTS:
        raise ToolRefused(odd[0])
    return odd


def refuse_nothing(
    where: str, found: Sequence[Sequence[Document]], info: Mapping[str, Any]
) -> None:
    """Raise ToolRefused for no documents, documents without text, or the same for all queries."""
    documents = [document for result in found for document in result]
    asked = f"{len(found)} questions of the run"
    if not documents:
        got = f"no document for any of {asked}"
        raise ToolRefused(explain(where, got, "passages", NOTHING_FIX))
    if 2 * count_blank(documents) > len(documents):
        got = f"{count_blank(documents)} of {len(documents)} documents without text for {asked}"
        raise ToolRefused(explain(where, got, "passages", "serve a corpus with texts"))
    distinct = {tuple((d.id, d.contents) for d in result) for result in found}
    size = info.get("num_documents")
    is_tiny = isinstance(size, int) and size <= len(found[0])
    if len(distinct) == 1 and not is_tiny:
        got = f"the same {len(found[0])} documents for all of {asked}"
        fix = "see how the server reads `queries`, and its index"
        raise ToolRefused(explain(where, got, "documents for each query", fix))


def odd_sources(
    where: str, asked: Sequence[Asked], found: Sequence[Sequence[Document]], rule: str,
    info: Mapping[str, Any],
) -> Iterator[str]:  # fmt: skip
    """Yield a line for each data source whose answers the documents hardly ever hold.

    Both shares were measured with fitting and other corpora (docs/evidence/silence.md).
    """
    held: dict[str, list[bool]] = {}
    named: Counter[str] = Counter()
    for one, documents in zip(asked, found, strict=True):
        held.setdefault(one.source, []).append(holds_answer(documents, one.accepted, RULES[rule]))
        titles = [document.title for document in documents]
        named[one.source] += contains_answer(one.question, titles, RULES[rule])
    size = info.get("num_documents", "an unknown number of")
    for source, hits in held.items():
        is_low = sum(hits) <= LOW_SHARE * len(hits) and named[source] < NAMED_SHARE * len(hits)
        if len(hits) >= MIN_QUESTIONS and is_low:
            got = f"an answer in the documents for {sum(hits)} of {len(hits)} questions of {source}"
            expected = f"the corpus of these questions (it serves {size} documents)"
            yield explain(where, got, expected, CORPUS_FIX)
