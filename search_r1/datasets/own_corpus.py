"""A folder of .txt and .md files as a corpus of passages."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from search_r1.options import Bounds
from search_r1.search.index.passages import MAX_WORDS, read_folder, write_corpus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """What is read, and where the corpus is written."""

    folder: tyro.conf.Positional[Path]
    """texts in UTF-8; folders inside are read too"""
    out: Path = Path("data/own/corpus.jsonl")
    """the corpus"""
    max_words: Annotated[int, Bounds(1)] = MAX_WORDS
    """words of a passage"""


def build(options: CorpusOptions) -> int:
    """Write the corpus. Raises SearchError."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    count = write_corpus(read_folder(options.folder, options.max_words), options.out)
    logger.info("%s: %d passages", options.out, count)
    return 0
