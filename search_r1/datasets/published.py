"""Question files of published sets."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from search_r1.datasets.building import copy_folder, make_rows, take_sound, write_rows
from search_r1.datasets.catalogue import QuestionSet, find_sets
from search_r1.datasets.options import MergeOptions, RagOptions, SetOptions
from search_r1.datasets.question import Question
from search_r1.datasets.retrieving import CacheFinder, Finder, ServerFinder
from search_r1.datasets.sources import read_split
from search_r1.datasets.wording import Style, writer
from verl.errors import ConfigError, explain


def nq(options: SetOptions) -> int:
    """Natural Questions to be answered from memory: the direct baseline."""
    return build(options, style=Style.DIRECT)


def nq_rag(options: RagOptions) -> int:
    """Natural Questions with found documents in the prompts: the RAG baseline."""
    return build(options, style=Style.RAG)


def nq_search(options: SetOptions) -> int:
    """Natural Questions for an agent that searches."""
    return build(options)


def qa_search_train_merge(options: MergeOptions) -> int:
    """Training questions of several sets for an agent that searches."""
    return build(options, roles=("train",))


def qa_search_test_merge(options: MergeOptions) -> int:
    """Test questions of several sets for an agent that searches."""
    return build(options, roles=("test",))


def build(
    options: SetOptions,
    style: Style = Style.SEARCH,
    roles: Sequence[str] = ("train", "test"),
) -> int:
    """Write `<role>.parquet` for each role.

    Every set is read first, so that mistakes end before anything is written.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    words = writer(style, options.template_type)
    finder = make_finder(options) if isinstance(options, RagOptions) else None
    names = options.data_sources.split(",") if isinstance(options, MergeOptions) else ["nq"]
    wanted = [(role, [(one, one.split_for(role)) for one in find_sets(names)]) for role in roles]
    files = {role: read_all(parts, options) for role, parts in wanted}
    documents = {role: finder.find(found) for role, found in files.items()} if finder else {}
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
        return ServerFinder(options.retriever_url, options.topk)
    if options.corpus_path is None:
        fix = "give the corpus that the caches were made of"
        raise ConfigError(explain("--corpus_path", "nothing", "a jsonl corpus", fix))
    return CacheFinder(caches, options.corpus_path, options.topk)
