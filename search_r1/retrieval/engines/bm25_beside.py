"""A BM25 index beside its corpus, built at the first start without --index_path."""

import logging
from collections.abc import Callable
from pathlib import Path

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.errors import IndexMismatch
from search_r1.retrieval.index_builder import BuildConfig, build_index

logger = logging.getLogger(__name__)


def open_beside(corpus: Corpus, open_index: Callable[[Path], Retriever]) -> Retriever:
    """Open the index beside the corpus, built again if it is outdated."""
    folder = corpus.path.parent / "index" / corpus.path.stem / "bm25"
    if folder.is_dir():
        try:
            return open_index(folder)
        except IndexMismatch as error:
            logger.warning("building the index of the corpus again: %s", error)
    logger.info("no --index_path: building a BM25 index of %s in %s", corpus.path, folder)
    build_index(BuildConfig("bm25", str(corpus.path), str(folder.parent)))
    return open_index(folder)
