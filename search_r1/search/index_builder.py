"""Builds a BM25 or dense index of a jsonl corpus: `python -m search_r1.search.index_builder`.

`--save_dir DIR` receives `DIR/bm25/` or `DIR/<name>_<faiss_type>.index/`, each with a manifest of
what it was built from. A build that was killed goes on when the same command is run again; see
docs/indexing.md. The work is that of `bm25_builder` and `dense_builder`.
"""

import logging
import sys
from pathlib import Path

if not __package__:  # started as a file: the checkout may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.options import parse
from search_r1.search.corpus import Corpus
from search_r1.search.errors import SearchError, SetupError
from search_r1.search.index.build_config import BuildConfig, index_folder

__all__ = ["BuildConfig", "build_index", "index_folder", "main"]

logger = logging.getLogger(__name__)


def build_index(config: BuildConfig) -> Path:
    """Build the index and return its folder; an older one there is replaced when it is complete.

    Raises CorpusError for a malformed row, SetupError for what is missing or does not fit.
    """
    corpus = Corpus.open(config.corpus_path)
    folder = index_folder(config.save_dir, config.retrieval_method, config.faiss_type)
    build = _bm25 if config.retrieval_method == "bm25" else _dense
    build(config, corpus, folder)
    logger.info("index of %d documents is in %s", len(corpus), folder)
    return folder


def _bm25(config: BuildConfig, corpus: Corpus, folder: Path) -> None:
    try:
        from search_r1.search.index import bm25_builder  # noqa: PLC0415
    except ImportError as error:
        raise SetupError(f"BM25 needs bm25s ({error}); pip install bm25s") from error
    bm25_builder.build(config, corpus, folder)


def _dense(config: BuildConfig, corpus: Corpus, folder: Path) -> None:
    try:
        from search_r1.search.index import dense_builder  # noqa: PLC0415
    except ImportError as error:
        raise SetupError(f"a dense index needs FAISS ({error}); pip install faiss-cpu") from error
    dense_builder.build(config, corpus, folder)


def main(argv: list[str] | None = None) -> int:
    """Command-line entry; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    config = parse(BuildConfig, argv, prog="index_builder", description=__doc__)
    try:
        build_index(config)
    except SearchError as error:
        sys.stderr.write(f"index_builder: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
