"""Builds a BM25 or dense index of a jsonl corpus: `python -m search_r1.search.index_builder`.

`--save_dir DIR` receives `DIR/bm25/` or `DIR/<name>_<faiss_type>.index/`, each with a manifest of
what it was built from. A build that was killed goes on when the same command is run again; see
docs/indexing.md. The work is that of `bm25_builder` and `dense_builder`. `checksums` as the first
word adds checksums to an index and a corpus that have none, or compares them (`--verify`).
"""

import importlib
import logging
import sys
from pathlib import Path

if not __package__:  # started as a file: the checkout may not be installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from search_r1.options import parse
from search_r1.search import checksums
from search_r1.search.backends.dense import vectors_file
from search_r1.search.backends.flat_file import FlatFile, is_flat
from search_r1.search.corpus import Corpus
from search_r1.search.errors import SearchError, SetupError
from search_r1.search.index.build_config import BuildConfig, ChecksumConfig, index_folder

__all__ = ["BuildConfig", "build_index", "index_folder", "main"]

logger = logging.getLogger(__name__)

BM25 = ("bm25_builder", "BM25 needs bm25s", "bm25s")
DENSE = ("dense_builder", "a dense index needs FAISS", "faiss-cpu")
"""The module that builds, and what is said, with the package to install, where it cannot."""


def build_index(config: BuildConfig) -> Path:
    """Build the index and return its folder; an older one there is replaced when it is complete.

    Raises CorpusError for a malformed row, SetupError for what is missing or does not fit.
    """
    corpus = Corpus.open(config.corpus_path)
    folder = index_folder(config.save_dir, config.retrieval_method, config.faiss_type)
    name, what, package = BM25 if config.retrieval_method == "bm25" else DENSE
    try:  # only its users need what builds an index
        builder = importlib.import_module(f"search_r1.search.index.{name}")
    except ImportError as error:
        raise SetupError(f"{what} ({error}); pip install {package}") from error
    builder.build(config, corpus, folder)
    logger.info("index of %d documents is in %s", len(corpus), folder)
    return folder


def keep_checksums(config: ChecksumConfig) -> None:
    """Keep the checksums of index and corpus as they are now, or compare them.

    Raises CorpusError or IndexMismatch for what is damaged, SetupError for what is not there.
    """
    digest = ""
    if config.corpus_path is not None:
        if not config.verify:
            checksums.place(Path(config.corpus_path)).unlink(missing_ok=True)
        corpus = Corpus.open(config.corpus_path, whole=config.verify)
        corpus.check_rows(whole=True)
        digest = corpus.fingerprint.digest
    if config.index_path is not None:
        index = Path(config.index_path)
        if not index.exists() or not (index.is_file() or any(p.is_file() for p in index.glob("*"))):
            raise SetupError(f"--index_path {index} is no index; expected a file, or its folder")
        file = vectors_file(index)
        if file.is_file() and is_flat(file):
            FlatFile.open(file).check_finite(whole=True)
        if not config.verify:
            checksums.add(index, digest)
        elif checksums.check(index, whole=True) is None:
            raise SetupError(
                f"{index} has no checksums; `{checksums.add_command(index)}` adds them"
            )
        logger.info("%s: %s", index, "as it was" if config.verify else "checksums added")


def main(argv: list[str] | None = None) -> int:
    """Command-line entry; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    words = sys.argv[1:] if argv is None else argv
    try:
        if words[:1] == ["checksums"]:
            about = "Adds checksums to an index and a corpus, or compares them."
            keep_checksums(parse(ChecksumConfig, words[1:], prog="checksums", description=about))
        else:
            build_index(parse(BuildConfig, words, prog="index_builder", description=__doc__))
    except SearchError as error:
        sys.stderr.write(f"index_builder: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
