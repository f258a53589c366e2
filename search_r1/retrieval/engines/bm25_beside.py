"""A BM25 index beside its corpus, built at the first start without --index_path."""

import logging

from search_r1.retrieval.corpus import Corpus
from search_r1.retrieval.engines.bm25 import Bm25Retriever
from search_r1.retrieval.errors import IndexMismatch
from search_r1.retrieval.index_builder import BuildConfig, build_index
from search_r1.retrieval.settings import RetrieverConfig

logger = logging.getLogger(__name__)


def open_beside(corpus: Corpus, config: RetrieverConfig) -> Bm25Retriever:
    """Open the index beside the corpus, built again if it is outdated."""
    folder = corpus.path.parent / "index" / corpus.path.stem / "bm25"
    if folder.is_dir():
        try:
            return Bm25Retriever.open(folder, corpus, config)
        except IndexMismatch as error:
            logger.warning("building the index of the corpus again: %s", error)
    logger.info("no --index_path: building a BM25 index of %s in %s", corpus.path, folder)
    build_index(BuildConfig("bm25", str(corpus.path), str(folder.parent)))
    return Bm25Retriever.open(folder, corpus, config)
