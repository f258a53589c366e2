"""Which module has the retriever backend that the settings name; it is imported only then.

A row names a module with a function `open_retriever(config) -> Retriever`, and the packages that
it needs, so that a backend's packages are wanted only by its users.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from search_r1.search.backends.base import Retriever
from search_r1.search.backends.settings import RetrieverConfig
from search_r1.search.errors import SetupError
from search_r1.search.extras import install_command

PACKAGE = "search_r1.search.backends"


@dataclass(frozen=True)
class Backend:
    """A row of the registry."""

    module: str
    """Its full name."""
    install: str = ""
    """The command that installs what its import wants."""


FAISS = Backend(f"{PACKAGE}.faiss_index", install_command("dense"))
TORCH = Backend(f"{PACKAGE}.torch_flat", install_command("dense"))
LUCENE = Backend(f"{PACKAGE}.lucene", install_command("lucene"))
ONLINE = Backend("search_r1.online.engine", install_command("online"))
RERANK = Backend(f"{PACKAGE}.rerank", install_command("dense"))
BACKENDS = {
    "bm25": Backend(f"{PACKAGE}.bm25", "pip install bm25s"),
    "lucene": LUCENE,
    "google": ONLINE,
    "serpapi": ONLINE,
    "brave": ONLINE,
    "serper": ONLINE,
    "tavily": ONLINE,
    "empty": Backend(f"{PACKAGE}.diagnostics"),
    "random": Backend(f"{PACKAGE}.diagnostics"),
    "oracle": Backend(f"{PACKAGE}.diagnostics"),
    "replay": Backend(f"{PACKAGE}.replay"),
}
"""By --retriever_name; any other name is a dense index."""


def build_retriever(config: RetrieverConfig) -> Retriever:
    """Open the backend that `config` names; raises a SearchError that says what to fix."""
    backend, settings = _load(_choose(config)), config.rerank
    reranking = None if settings.reranker_model is None else _load(RERANK)
    scorer = reranking and reranking.open_scorer(settings)  # before an index that takes minutes
    retriever: Retriever = backend.open_retriever(config)
    if reranking is not None:
        retriever = reranking.RerankingRetriever(retriever, scorer, settings.retrieval_topk)
    return retriever


def _choose(config: RetrieverConfig) -> Backend:
    """The backend of the settings; `bm25` with the folder of a Lucene index is Lucene's."""
    name = config.retriever_name
    if name == "bm25" and config.index_path and _is_lucene(Path(config.index_path)):
        return LUCENE
    if name in BACKENDS:
        return BACKENDS[name]
    if config.encoder.retriever_model is None:
        raise SetupError(
            f"--retriever_name {name} without --retriever_model; expected "
            f"{', '.join(BACKENDS)}, or another name together with an encoder: "
            "for example --retriever_name e5 --retriever_model intfloat/e5-base-v2"
        )
    dense = {"faiss": FAISS, "torch": TORCH}
    if config.torch.dense_engine not in dense:
        raise SetupError(f"--dense_engine {config.torch.dense_engine}; expected faiss or torch")
    return dense[config.torch.dense_engine]


def _is_lucene(path: Path) -> bool:
    """Whether the folder, or the `bm25` folder in it, holds Lucene's segments."""
    return any(any(folder.glob("segments_*")) for folder in (path, path / "bm25"))


def _load(backend: Backend) -> ModuleType:
    try:
        return importlib.import_module(backend.module)
    except ImportError as error:
        raise SetupError(
            f"{error}, which this backend needs; install it: {backend.install}"
        ) from error
