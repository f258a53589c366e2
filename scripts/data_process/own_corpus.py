"""A folder of .txt and .md files as a corpus: `python scripts/data_process/own_corpus.py texts`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # started as a file: the checkout may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.search.errors import SearchError
from search_r1.search.index.passages import MAX_WORDS, read_folder, write_corpus

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; a user's mistake ends in one message and status 2."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    options = parser().parse_args(argv)
    try:
        count = write_corpus(read_folder(options.folder, options.max_words), options.out)
    except SearchError as error:
        sys.stderr.write(f"own_corpus: {error}\n")
        return 2
    logger.info("%s: %d passages", options.out, count)
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(prog="own_corpus", description=__doc__)
    add = result.add_argument
    add("folder", type=Path, help="texts in UTF-8; folders inside are read too")
    add("--out", type=Path, default=Path("data/own/corpus.jsonl"), help="the corpus (%(default)s)")
    add("--max_words", type=int, default=MAX_WORDS, help="words of a passage (%(default)s)")
    return result


if __name__ == "__main__":
    sys.exit(main())
