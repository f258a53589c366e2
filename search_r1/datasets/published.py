"""Builds question files of published sets, with one function for each script of the original.

The seven sets of the Search-R1 paper are loaded from the hub with `datasets`, or from local files
in the same layout. `HF_ENDPOINT` names a mirror, and `HF_HUB_OFFLINE=1` uses the cache only; the
hub's library reads both. The documents for RAG prompts come from a retrieval server, or from a
cache file like the original's: a JSON object from the question to its hits, best first, each with
the `id` of a passage of the corpus.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import constants

from search_r1.datasets.command import MergeOptions, RagOptions, SetOptions
from search_r1.datasets.hub import FLASHRAG
from search_r1.datasets.question import (
    ALIAS_COLUMNS,
    ANSWER_COLUMNS,
    Question,
    RecordLocation,
    as_question,
    copy_folder,
    make_rows,
    read_question,
    valid_questions,
    write_rows,
)
from search_r1.datasets.wording import PromptStyle, prompt_writer
from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.errors import RetrieverRefused, SearchError
from search_r1.retrieval.index.progress import progress
from search_r1.retrieval.schema import Document
from verl.data.records import BadRow, Record
from verl.data.rows import read_records
from verl.errors import ConfigError, DataError, ToolError, explain, first_line
from verl.files import regular_file
from verl.hub_access import hub_problem

logger = logging.getLogger(__name__)

MAX_CONCURRENT = 512
"""Maximum number of concurrent queries to the server."""
SUFFIXES = (".jsonl", ".parquet")
COLUMNS = ("id", "question", *ANSWER_COLUMNS, *ALIAS_COLUMNS, "answerable")
"""Columns to read from the hub's tables; the column `metadata` is large and not needed."""
TEST_SPLITS = ("test", "dev", "train")
"""Splits for tests, most preferred first, as in the original scripts."""
Finder = Callable[[Sequence[Question]], list[list[Document]]]
"""Returns the documents of each question, best first."""


def server_finder(url: str, topk: int) -> Finder:
    """Return a finder that queries a retrieval server for `topk` documents per question.

    Raises ConfigError for an invalid address; the finder raises ToolError if the server fails.
    """
    try:
        client = RetrievalClient(url, topk)
    except ValueError as error:
        fix = "give --retriever_url http://HOST:PORT/retrieve"
        raise ConfigError(explain("--retriever_url", str(error), "an address", fix)) from error

    def find(questions: Sequence[Question]) -> list[list[Document]]:
        try:
            return asyncio.run(_ask(client, [question.text for question in questions]))
        except SearchError as error:
            fix = "start it (bash retrieval_launch.sh) and name it by --retriever_url"
            raise ToolError(
                explain("--retriever_url", str(error), "a search server", fix)
            ) from error

    return find


async def _ask(client: RetrievalClient, texts: Sequence[str]) -> list[list[Document]]:
    documents: list[list[Document]] = []
    async with client:
        with contextlib.suppress(RetrieverRefused):  # other implementations have no /health
            await client.health()
        with progress("find documents", "questions", len(texts)) as report:
            for start in range(0, len(texts), MAX_CONCURRENT):
                block = texts[start : start + MAX_CONCURRENT]
                documents += await asyncio.gather(*(client.search(text) for text in block))
                report(len(documents))
    return documents


def cache_finder(caches: Sequence[Path], corpus: Path, topk: int) -> Finder:
    """Return a finder of `topk` passages in caches and their corpus; both raise DataError."""
    hits: dict[str, list[str]] = {}
    for cache in caches:
        hits |= {as_question(text): ids for text, ids in _read_cache(cache, topk)}
    documents = _read_documents(corpus, {id for ids in hits.values() for id in ids})

    def find(questions: Sequence[Question]) -> list[list[Document]]:
        missing = [question for question in questions if question.text not in hits]
        if missing:
            got = f"no hits for {len(missing)} of {len(questions)} questions: {missing[0].text!r}"
            fix = "give the caches of these splits, or a server by --retriever_url"
            names = ", ".join(map(str, caches))
            raise DataError(explain(names, got, "hits for every question", fix))
        return [[documents[id] for id in hits[question.text]] for question in questions]

    return find


def _read_cache(path: Path, topk: int) -> Iterator[tuple[str, list[str]]]:
    """Yield questions with the ids of their `topk` best passages."""
    try:
        content: Mapping[str, Any] = json.loads(regular_file(path).read_bytes())
        for text, hits in content.items():
            yield text, [str(hit["id"]) for hit in hits[:topk]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        expected = '{"question": [{"id": "7"}, ...], ...}'
        raise DataError(explain(str(path), got, expected, "build the cache again")) from error


def _read_documents(path: Path, ids: set[str]) -> dict[str, Document]:
    """Return the passages of a corpus with these ids. Raises DataError if some are missing."""
    try:
        documents = {document.id: document for document in Corpus.open(path) if document.id in ids}
    except SearchError as error:
        raise DataError(explain(str(path), str(error), "a corpus", "correct it")) from error
    missing = sorted(ids - documents.keys())
    if missing:
        got = f"{len(missing)} ids of the caches are not in it, such as {missing[0]!r}"
        fix = "give the corpus that the caches were made of by --corpus_path"
        raise DataError(explain(str(path), got, "the caches' passages", fix))
    return documents


@dataclass(frozen=True)
class QuestionSet:
    """A published set and its splits in the collection."""

    name: str
    title: str
    splits: tuple[str, ...]

    def split_for(self, role: str) -> str:
        """Return the published split for `train` or `test`. Raises ConfigError if there is none."""
        if role == "test":
            return next(split for split in TEST_SPLITS if split in self.splits)
        if role not in self.splits:
            got = f"{self.name}, which has {' and '.join(self.splits)} only"
            fix = "leave it out of --data_sources here; it is a test set"
            raise ConfigError(explain("--data_sources", got, f"sets with a {role} split", fix))
        return role


SETS = {
    question_set.name: question_set
    for question_set in (
        QuestionSet("nq", "Natural Questions", ("train", "dev", "test")),
        QuestionSet("triviaqa", "TriviaQA", ("train", "dev", "test")),
        QuestionSet("popqa", "PopQA", ("test",)),
        QuestionSet("hotpotqa", "HotpotQA", ("train", "dev")),
        QuestionSet("2wikimultihopqa", "2WikiMultiHopQA", ("train", "dev")),
        QuestionSet("musique", "MuSiQue", ("train", "dev")),
        QuestionSet("bamboogle", "Bamboogle", ("test",)),
    )
}


def find_sets(names: Sequence[str]) -> list[QuestionSet]:
    """Return the sets of `--data_sources`; raises ConfigError for unknown or repeated names."""
    for name in names:
        if name not in SETS:
            fix = "correct it; own_questions.py builds your own sets (docs/guides/data.md)"
            expected = f"names among {', '.join(SETS)}"
            raise ConfigError(explain("--data_sources", repr(name), expected, fix))
        if names.count(name) > 1:
            got = f"{name} {names.count(name)} times"
            raise ConfigError(explain("--data_sources", got, "each set once", "drop the repeats"))
    return [SETS[name] for name in names]


def build(
    options: SetOptions,
    style: PromptStyle = PromptStyle.SEARCH,
    roles: Sequence[str] = ("train", "test"),
) -> int:
    """Write `<role>.parquet` for each role, after all sets have been read."""
    write_prompt = prompt_writer(style, options.template_type)
    finder = make_finder(options) if isinstance(options, RagOptions) else None
    names = options.data_sources.split(",") if isinstance(options, MergeOptions) else ["nq"]
    sources = {role: [(s, s.split_for(role)) for s in find_sets(names)] for role in roles}
    questions = {role: read_all(splits, options) for role, splits in sources.items()}
    documents = {role: finder(questions[role]) for role in roles} if finder else {}
    for role in roles:
        rows = make_rows(questions[role], write_prompt, role, documents.get(role))
        write_rows(rows, options.local_dir / f"{role}.parquet")
    if options.hdfs_dir:
        copy_folder(options.local_dir, options.hdfs_dir)
    return 0


def read_all(splits: Sequence[tuple[QuestionSet, str]], options: SetOptions) -> list[Question]:
    """Return the questions of several splits. Raises DataError."""
    folder = options.local_dataset_path
    results = itertools.chain.from_iterable(
        read_split(question_set, split, folder) for question_set, split in splits
    )
    return valid_questions(results, drop_bad=options.drop_bad_rows)


def make_finder(options: RagOptions) -> Finder:
    """Return a finder for the caches, or else the server. Raises ConfigError, DataError."""
    caches = [c for c in (options.train_retrieval_cache, options.test_retrieval_cache) if c]
    if not caches:
        return server_finder(options.retriever_url, options.topk)
    if options.corpus_path is None:
        fix = "give the corpus that the caches were made of"
        raise ConfigError(explain("--corpus_path", "nothing", "a jsonl corpus", fix))
    return cache_finder(caches, options.corpus_path, options.topk)


def read_split(
    question_set: QuestionSet, split: str, folder: Path | None = None
) -> Iterator[Question | BadRow]:
    """Yield the questions and bad rows of a published split, in order.

    They come from the hub, or from `folder` in its layout (`<set>/<split>.jsonl`, or parquet).
    Raises DataError if the split is not available.
    """
    if folder:
        file, records = _read_folder(question_set, split, folder)
    else:
        file, records = _read_hub(question_set, split)
    for number, record in records:
        yield read_question(record, RecordLocation(file, number, question_set.name, split))


def _read_folder(
    question_set: QuestionSet, split: str, folder: Path
) -> tuple[str, Iterator[Record]]:
    """Return path and records of a split in a local folder: that of all sets, or of this one."""
    parents = [folder / question_set.name]
    if folder.name == question_set.name:
        parents.append(folder)
    candidates = [parent / f"{split}{suffix}" for parent in parents for suffix in SUFFIXES]
    file = next((path for path in candidates if path.is_file()), None)
    if file is None:
        expected = f"{candidates[0]} (or .parquet), as in {FLASHRAG}"
        download = f"hf download --repo-type dataset {FLASHRAG} --local-dir {folder}"
        fix = f"copy the file there, or: {download}"
        raise DataError(explain("--local_dataset_path", "no such file", expected, fix))
    return str(file), read_records(str(file), ("question",))


def _read_hub(question_set: QuestionSet, split: str) -> tuple[str, Iterator[Record]]:
    """Return name and records of a split, downloaded from the hub or from its cache."""
    name = f"{FLASHRAG}/{question_set.name}/{split}"
    logger.info("loading %s", name)
    if problem := hub_problem():
        logger.warning("%s: only the cache can have %s", problem, name)
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        table = datasets.load_dataset(FLASHRAG, question_set.name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        fix = (
            "check the network, name a mirror (HF_ENDPOINT=https://...), or give files: "
            "--local_dataset_path FOLDER (docs/guides/data.md)"
        )
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(explain(name, reason, "the published split", fix)) from error
    columns = [column for column in COLUMNS if column in table.column_names]
    return name, enumerate(table.select_columns(columns))


nq = functools.partial(build, style=PromptStyle.DIRECT)
nq_rag = functools.partial(build, style=PromptStyle.RAG)
nq_search = build
qa_search_train_merge = functools.partial(build, roles=("train",))
qa_search_test_merge = functools.partial(build, roles=("test",))
