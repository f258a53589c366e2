"""Question files of published sets: a function for each script of the original."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from search_r1.datasets.building import copy_folder, make_rows, take_sound, write_rows
from search_r1.datasets.catalogue import QuestionSet, find_sets
from search_r1.datasets.options import MergeOptions, RagOptions, SetOptions
from search_r1.datasets.question import Question
from search_r1.datasets.retrieving import Finder, cache_finder, server_finder
from search_r1.datasets.sources import read_split
from search_r1.datasets.wording import Style, writer
from verl.errors import ConfigError, explain


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


nq = functools.partial(build, style=Style.DIRECT)
nq_rag = functools.partial(build, style=Style.RAG)
nq_search = build
qa_search_train_merge = functools.partial(build, roles=("train",))
qa_search_test_merge = functools.partial(build, roles=("test",))
