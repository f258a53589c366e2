"""Question files of published sets: a function for each script of the original.

The seven sets of the Search-R1 paper come from the hub through `datasets`, or from files laid out
as there. `HF_ENDPOINT` names a mirror, and `HF_HUB_OFFLINE=1` takes what an earlier run left in the
cache; both are read by the hub's own library. Documents for questions that are asked without
searching come from a server, or from a cache file as the original's: a JSON object from the
question to its hits, best first, each with the `id` of a passage of the corpus.
"""

import asyncio
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.errors

from search_r1.datasets.command import MergeOptions, RagOptions, SetOptions
from search_r1.datasets.hub import FLASHRAG
from search_r1.datasets.question import (
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
from search_r1.search.client import RetrievalClient
from search_r1.search.corpus import Corpus
from search_r1.search.errors import SearchError
from search_r1.search.index.progress import progress
from search_r1.search.schema import Document
from verl.data.rows import BadRow, Record, read_records
from verl.errors import ConfigError, DataError, ToolError, explain, first_line
from verl.files import regular_file

AT_ONCE = 512
"""Questions that wait for the server at one time."""


Finder = Callable[[Sequence[Question]], list[list[Document]]]
"""Gives the documents of each question, best first."""


def server_finder(url: str, topk: int) -> Finder:
    """Asks a retrieval server, `topk` documents a question.

    Raises ConfigError for an address that is none; the finder ToolError where nobody answers.
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
    found: list[list[Document]] = []
    async with client:
        await client.health()
        with progress("find documents", "questions", len(texts)) as report:
            for start in range(0, len(texts), AT_ONCE):
                some = texts[start : start + AT_ONCE]
                found += await asyncio.gather(*(client.search(text) for text in some))
                report(len(found))
    return found


def cache_finder(caches: Sequence[Path], corpus: Path, topk: int) -> Finder:
    """Finds `topk` passages a question in caches and their corpus; it raises DataError, as this."""
    hits: dict[str, list[str]] = {}
    for cache in caches:
        hits |= {as_question(text): ids for text, ids in _read_cache(cache, topk)}
    documents = _read_documents(corpus, {i for ids in hits.values() for i in ids})

    def find(questions: Sequence[Question]) -> list[list[Document]]:
        missing = [question for question in questions if question.text not in hits]
        if missing:
            got = f"no hits for {len(missing)} of {len(questions)} questions: {missing[0].text!r}"
            fix = "give the caches of these splits, or a server by --retriever_url"
            names = ", ".join(map(str, caches))
            raise DataError(explain(names, got, "hits for every question", fix))
        return [[documents[i] for i in hits[q.text]] for q in questions]

    return find


def _read_cache(path: Path, topk: int) -> Iterator[tuple[str, list[str]]]:
    """Questions and the ids of their best passages."""
    try:
        content: Mapping[str, Any] = json.loads(regular_file(path).read_bytes())
        yield from (
            (text, [str(hit["id"]) for hit in hits[:topk]]) for text, hits in content.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        expected = '{"question": [{"id": "7"}, ...], ...}'
        raise DataError(explain(str(path), got, expected, "build the cache again")) from error


def _read_documents(path: Path, wanted: set[str]) -> dict[str, Document]:
    """The wanted passages of a corpus by id. Raises DataError where some are missing."""
    try:
        documents = {one.id: one for one in Corpus.open(path) if one.id in wanted}
    except SearchError as error:
        raise DataError(explain(str(path), str(error), "a corpus", "correct it")) from error
    missing = sorted(wanted - documents.keys())
    if missing:
        got = f"{len(missing)} ids of the caches are not in it, such as {missing[0]!r}"
        fix = "give the corpus that the caches were made of by --corpus_path"
        raise DataError(explain(str(path), got, "the caches' passages", fix))
    return documents


TEST_SPLITS = ("test", "dev", "train")
"""The first of these that a set has is what it is tested on, as in the original scripts."""


@dataclass(frozen=True)
class QuestionSet:
    """A published set, and what splits the collection has of it."""

    name: str
    title: str
    splits: tuple[str, ...]

    def split_for(self, role: str) -> str:
        """The published split behind `train` or `test`. Raises ConfigError where there is none."""
        if role == "test":
            return next(split for split in TEST_SPLITS if split in self.splits)
        if role not in self.splits:
            got = f"{self.name}, which has {' and '.join(self.splits)} only"
            fix = "leave it out of --data_sources here; it is a test set"
            raise ConfigError(explain("--data_sources", got, f"sets with a {role} split", fix))
        return role


SETS = {
    one.name: one
    for one in (
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
    """The sets of `--data_sources`, in that order. Raises ConfigError for a wrong name or twice."""
    for name in names:
        if name not in SETS:
            fix = "correct it; a set of your own is built by own_questions.py (docs/data.md)"
            expected = f"names among {', '.join(SETS)}"
            raise ConfigError(explain("--data_sources", repr(name), expected, fix))
        if list(names).count(name) > 1:
            got = f"{name} {list(names).count(name)} times"
            raise ConfigError(explain("--data_sources", got, "each set once", "drop the others"))
    return [SETS[name] for name in names]


logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".parquet")
COLUMNS = ("id", "question", *ANSWER_COLUMNS)
"""What is read of the hub's tables: their `metadata` holds whole contexts."""


def build(
    options: SetOptions,
    style: PromptStyle = PromptStyle.SEARCH,
    roles: Sequence[str] = ("train", "test"),
) -> int:
    """Write `<role>.parquet` for each role, once every set was read."""
    words = prompt_writer(style, options.template_type)
    finder = make_finder(options) if isinstance(options, RagOptions) else None
    names = options.data_sources.split(",") if isinstance(options, MergeOptions) else ["nq"]
    wanted = [(role, [(one, one.split_for(role)) for one in find_sets(names)]) for role in roles]
    files = {role: read_all(parts, options) for role, parts in wanted}
    documents = {role: finder(found) for role, found in files.items()} if finder else {}
    for role, found in files.items():
        rows = make_rows(found, words, role, documents.get(role))
        write_rows(rows, options.local_dir / f"{role}.parquet")
    if options.hdfs_dir:
        copy_folder(options.local_dir, options.hdfs_dir)
    return 0


def read_all(parts: Sequence[tuple[QuestionSet, str]], options: SetOptions) -> list[Question]:
    local = options.local_dataset_path
    found = (one for which, split in parts for one in read_split(which, split, local))
    return valid_questions(found, drop_bad=options.drop_bad_rows)


def make_finder(options: RagOptions) -> Finder:
    """Caches where they are given, else the server. Raises ConfigError, DataError."""
    caches = [c for c in (options.train_retrieval_cache, options.test_retrieval_cache) if c]
    if not caches:
        return server_finder(options.retriever_url, options.topk)
    if options.corpus_path is None:
        fix = "give the corpus that the caches were made of"
        raise ConfigError(explain("--corpus_path", "nothing", "a jsonl corpus", fix))
    return cache_finder(caches, options.corpus_path, options.topk)


def read_split(
    one: QuestionSet, split: str, local: Path | None = None
) -> Iterator[Question | BadRow]:
    """The questions of a published split in its order, or what is wrong with each.

    `local` is a folder as the hub has it (`<set>/<split>.jsonl`, or parquet). Raises DataError
    where the split cannot be had.
    """
    file, records = _from_folder(one, split, local) if local else _from_hub(one, split)
    for number, record in records:
        yield read_question(record, RecordLocation(file, number, one.name, split))


def _from_folder(one: QuestionSet, split: str, local: Path) -> tuple[str, Iterator[Record]]:
    """The file of a split below `local`, in a folder of the set's name or beside the others."""
    places = [f / f"{split}{s}" for f in (local / one.name, local) for s in SUFFIXES]
    if local.name != one.name:
        places = places[: len(SUFFIXES)]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        expected = f"{places[0]} (or .parquet), as in {FLASHRAG}"
        download = f"hf download --repo-type dataset {FLASHRAG} --local-dir {local}"
        fix = f"copy the file there, or: {download}"
        raise DataError(explain("--local_dataset_path", "no such file", expected, fix))
    return str(file), read_records(str(file), ("question",))


def _from_hub(one: QuestionSet, split: str) -> tuple[str, Iterator[Record]]:
    """The table of a split, downloaded or from the cache."""
    place = f"{FLASHRAG}/{one.name}/{split}"
    logger.info("loading %s", place)
    try:
        table = datasets.load_dataset(FLASHRAG, one.name, split=split)
    except (
        OSError,
        ValueError,
        datasets.exceptions.DatasetsError,
        huggingface_hub.errors.HfHubHTTPError,
    ) as error:
        fix = (
            "check the network, name a mirror (HF_ENDPOINT=https://...), or give files: "
            "--local_dataset_path FOLDER (docs/data.md)"
        )
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(explain(place, reason, "the published split", fix)) from error
    known = table.select_columns([name for name in COLUMNS if name in table.column_names])
    return place, enumerate(known)


nq = functools.partial(build, style=PromptStyle.DIRECT)
nq_rag = functools.partial(build, style=PromptStyle.RAG)
nq_search = build
qa_search_train_merge = functools.partial(build, roles=("train",))
qa_search_test_merge = functools.partial(build, roles=("test",))
