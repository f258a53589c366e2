"""The command line behind the scripts that build question files from published sets."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from search_r1.datasets.building import copy_folder, make_rows, take_sound, write_rows
from search_r1.datasets.catalogue import SETS, QuestionSet, find_sets
from search_r1.datasets.question import Question
from search_r1.datasets.retrieving import CacheFinder, Finder, ServerFinder
from search_r1.datasets.sources import read_split
from search_r1.datasets.wording import BASE, Style, template_types, writer
from verl.errors import ConfigError, SearchR1Error, explain

DEFAULT_URL = "http://127.0.0.1:8000/retrieve"


@dataclass(frozen=True)
class Script:
    """What one script builds."""

    name: str
    about: str
    local_dir: str
    """Default of `--local_dir`."""
    style: Style = Style.SEARCH
    roles: tuple[str, ...] = ("train", "test")
    """A file `<role>.parquet` each."""
    has_sources: bool = False
    """Takes `--data_sources`; otherwise it builds Natural Questions."""

    def run(self, argv: Sequence[str] | None = None) -> int:
        """Build the files; a user's mistake ends in one message and status 2."""
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        logging.getLogger("httpx").setLevel(logging.WARNING)
        options = self.parser().parse_args(argv)
        try:
            self.build(options)
        except SearchR1Error as error:
            sys.stderr.write(f"{self.name}: {error}\n")
            return 2
        return 0

    def parser(self) -> argparse.ArgumentParser:
        """The original's arguments, and ours for local files."""
        parser = argparse.ArgumentParser(prog=self.name, description=self.about)
        add = parser.add_argument
        add("--local_dir", type=Path, default=Path(self.local_dir), help="folder for the files")
        add("--hdfs_dir", help="copy the folder there too: a path, hdfs://, s3:// or gs://")
        names = ", ".join(template_types(self.style))
        add("--template_type", default=BASE, help=f"wording of the prompt: {names}")
        if self.has_sources:
            add("--data_sources", default="nq", help=f"with commas, among {','.join(SETS)}")
        add("--local_dataset_path", type=Path, help="folder <set>/<split>.jsonl instead of a hub")
        add("--drop_bad_rows", action="store_true", help="leave bad rows out instead of refusing")
        if self.style is Style.RAG:
            add("--topk", type=int, default=3, help="documents in each prompt")
            add("--retriever_url", default=DEFAULT_URL, help="server that finds the documents")
            add("--train_retrieval_cache", type=Path, help="JSON of hits instead of a server")
            add("--test_retrieval_cache", type=Path, help="the same for test questions")
            add("--corpus_path", type=Path, help="jsonl that the caches' ids belong to")
        return parser

    def build(self, options: argparse.Namespace) -> None:
        """Read every set first, so that mistakes end before anything is written."""
        words = writer(self.style, options.template_type)
        finder = make_finder(options) if self.style is Style.RAG else None
        sets = find_sets(options.data_sources.split(",") if self.has_sources else ["nq"])
        wanted = [(role, [(one, one.split_for(role)) for one in sets]) for role in self.roles]
        files = {role: read_all(parts, options) for role, parts in wanted}
        documents = {role: finder.find(found) for role, found in files.items()} if finder else {}
        for role, found in files.items():
            rows = make_rows(found, words, role, documents.get(role))
            write_rows(rows, options.local_dir / f"{role}.parquet")
        if options.hdfs_dir:
            copy_folder(options.local_dir, options.hdfs_dir)


def read_all(
    parts: Sequence[tuple[QuestionSet, str]], options: argparse.Namespace
) -> list[Question]:
    """The sound questions of several sets' splits, set by set."""
    local = options.local_dataset_path
    found = (one for which, split in parts for one in read_split(which, split, local))
    return take_sound(found, drop_bad=options.drop_bad_rows)


def make_finder(options: argparse.Namespace) -> Finder:
    """Caches where they are given, else the server. Raises ConfigError, DataError."""
    if options.topk < 1:
        raise ConfigError(explain("--topk", options.topk, "1 or more", "give --topk 3"))
    caches = [c for c in (options.train_retrieval_cache, options.test_retrieval_cache) if c]
    if not caches:
        return ServerFinder(options.retriever_url, options.topk)
    if options.corpus_path is None:
        fix = "give the corpus that the caches were made of"
        raise ConfigError(explain("--corpus_path", "nothing", "a jsonl corpus", fix))
    return CacheFinder(caches, options.corpus_path, options.topk)
