"""Which engine the settings name, where its index lies, and how it is opened."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from search_r1.search.corpus import Corpus
from search_r1.search.encoder import Encoder, SentenceEncoder
from search_r1.search.errors import IndexMismatch, SetupError
from search_r1.search.index_builder import BuildConfig, build_index, index_folder
from search_r1.search.manifest import build_command
from search_r1.search.retrievers.base import Retriever
from search_r1.search.retrievers.empty import EmptyRetriever

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetrieverConfig:
    """Everything that decides what a server searches and how."""

    retriever_name: str = "bm25"
    """`bm25`, `empty`, or any other name (`e5`, `bge` ...) for dense search with an encoder."""
    corpus_path: str | None = None
    """A jsonl corpus; every engine but `empty` needs it."""
    index_path: str | None = None
    """A built index, or a folder that holds `bm25` or `<name>_Flat.index`; BM25 builds its own."""
    retriever_model: str | None = None
    """Encoder folder or hub name; dense engines need it."""
    faiss_gpu: bool = False
    """Search on all GPUs, in half precision."""
    encoder: Encoder | None = None
    """An encoder that is already loaded, used in place of `retriever_model`."""


def build_retriever(config: RetrieverConfig) -> Retriever:
    """Open the engine that `config` names; raises a SearchError that says what to fix."""
    return BUILDERS.get(config.retriever_name, _open_dense)(config)


def _open_empty(config: RetrieverConfig) -> Retriever:
    return EmptyRetriever()


def _open_bm25(config: RetrieverConfig) -> Retriever:
    try:
        from search_r1.search.retrievers.bm25 import Bm25Retriever  # noqa: PLC0415
    except ImportError as error:
        raise SetupError(f"BM25 needs bm25s ({error}); pip install bm25s") from error
    corpus = _open_corpus(config)
    if config.index_path is not None:
        return Bm25Retriever.open(_locate(config, "bm25"), corpus)
    save_dir = corpus.path.parent / "index" / corpus.path.stem
    folder = index_folder(save_dir, "bm25")
    if folder.is_dir():
        try:
            return Bm25Retriever.open(folder, corpus)
        except IndexMismatch as error:
            logger.warning("the corpus has changed, building its index again: %s", error)
    logger.info("no --index_path: building a BM25 index of %s in %s", corpus.path, folder)
    build_index(BuildConfig("bm25", str(corpus.path), str(save_dir)))
    return Bm25Retriever.open(folder, corpus)


def _open_dense(config: RetrieverConfig) -> Retriever:
    name = config.retriever_name
    if config.encoder is None and config.retriever_model is None:
        raise SetupError(
            f"--retriever_name {name} without --retriever_model; expected "
            f"{', '.join(BUILDERS)}, or another name together with an encoder: "
            "for example --retriever_name e5 --retriever_model intfloat/e5-base-v2"
        )
    try:
        from search_r1.search.retrievers.dense import DenseRetriever  # noqa: PLC0415
    except ImportError as error:
        raise SetupError(f"dense search needs FAISS ({error}); pip install faiss-cpu") from error
    corpus = _open_corpus(config)
    path = _locate(config, f"{name}_Flat.index")
    encoder = config.encoder or SentenceEncoder(str(config.retriever_model))
    return DenseRetriever.open(name, path, corpus, encoder, on_gpu=config.faiss_gpu)


BUILDERS: dict[str, Callable[[RetrieverConfig], Retriever]] = {
    "bm25": _open_bm25,
    "empty": _open_empty,
}


def _open_corpus(config: RetrieverConfig) -> Corpus:
    if config.corpus_path is None:
        raise SetupError(
            f"--retriever_name {config.retriever_name} without --corpus_path; expected a jsonl "
            "corpus, for example --corpus_path example/corpus.jsonl"
        )
    return Corpus.open(config.corpus_path)


def _locate(config: RetrieverConfig, index_name: str) -> Path:
    """The index itself, when `index_path` is it or the folder around it."""
    command = build_command(str(config.corpus_path), "<folder>", config.retriever_name)
    if config.index_path is None:
        raise SetupError(
            f"--retriever_name {config.retriever_name} without --index_path; build an index "
            f"first: `{command}`"
        )
    path = Path(config.index_path)
    inner = path / index_name
    if inner.exists():
        return inner
    if not path.exists():
        raise SetupError(
            f"index {path} does not exist; expected a built index: set --index_path, or build "
            f"one: `{command}`"
        )
    return path
