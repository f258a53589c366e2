"""Question files of published sets: a function for each script of the original.

The seven sets of the Search-R1 paper come from the hub through `datasets`, or from files laid out
as there. `HF_ENDPOINT` names a mirror, and `HF_HUB_OFFLINE=1` takes what an earlier run left in the
cache; both are read by the hub's own library.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import huggingface_hub.errors

from search_r1.datasets.command import MergeOptions, RagOptions, SetOptions
from search_r1.datasets.question import (
    ANSWER_COLUMNS,
    Place,
    Question,
    copy_folder,
    make_rows,
    read_question,
    take_sound,
    write_rows,
)
from search_r1.datasets.retrieving import Finder, cache_finder, server_finder
from search_r1.datasets.wording import Style, writer
from verl.data.rows import BadRow, Record, read_records
from verl.errors import ConfigError, DataError, explain, first_line

HUB = "RUC-NLPIR/FlashRAG_datasets"
"""The FlashRAG collection on the Hugging Face hub; its configurations are named as the sets."""
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
    style: Style = Style.SEARCH,
    roles: Sequence[str] = ("train", "test"),
) -> int:
    """Write `<role>.parquet` for each role.

    Every set is read first, so that mistakes end before anything is written.
    """
    words = writer(style, options.template_type)
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
    """The sound questions of several sets' splits, set by set."""
    local = options.local_dataset_path
    found = (one for which, split in parts for one in read_split(which, split, local))
    return take_sound(found, drop_bad=options.drop_bad_rows)


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
        yield read_question(record, Place(file, number, one.name, split))


def _from_folder(one: QuestionSet, split: str, local: Path) -> tuple[str, Iterator[Record]]:
    """The file of a split below `local`, in a folder of the set's name or beside the others."""
    places = [f / f"{split}{s}" for f in (local / one.name, local) for s in SUFFIXES]
    if local.name != one.name:
        places = places[: len(SUFFIXES)]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        expected = f"{places[0]} (or .parquet), as in {HUB}"
        fix = f"copy the file there, or: hf download --repo-type dataset {HUB} --local-dir {local}"
        raise DataError(explain("--local_dataset_path", "no such file", expected, fix))
    return str(file), read_records(str(file), ("question",))


def _from_hub(one: QuestionSet, split: str) -> tuple[str, Iterator[Record]]:
    """The table of a split, downloaded or from the cache."""
    place = f"{HUB}/{one.name}/{split}"
    logger.info("loading %s", place)
    try:
        table = datasets.load_dataset(HUB, one.name, split=split)
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


nq = functools.partial(build, style=Style.DIRECT)
nq_rag = functools.partial(build, style=Style.RAG)
nq_search = build
qa_search_train_merge = functools.partial(build, roles=("train",))
qa_search_test_merge = functools.partial(build, roles=("test",))
