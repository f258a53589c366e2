"""Which module has the retriever backend that the settings name; it is imported only then.

A row names a module with a function `open_retriever(config) -> Retriever`, and the packages that
it needs, so that a backend's packages are wanted only by its users.
"""

import importlib
import logging
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from search_r1.search.backends.base import Retriever
from search_r1.search.backends.rerank import RerankingRetriever
from search_r1.search.errors import SetupError, install_command
from search_r1.search.settings import RetrieverConfig

logger = logging.getLogger(__name__)

PACKAGE = "search_r1.search.backends"


class Backend(NamedTuple):
    """A row: a module's full name, and the command that installs what its import wants."""

    module: str
    install: str = ""
    reads: tuple[str, ...] = ()
    """The groups of settings that are its own."""


FAISS = Backend(f"{PACKAGE}.faiss_index", install_command("dense"), ("encoder", "faiss"))
TORCH = Backend(f"{PACKAGE}.torch_flat", install_command("dense"), ("encoder", "torch"))
LUCENE = Backend(f"{PACKAGE}.lucene", install_command("lucene"))
ONLINE = Backend("search_r1.online.engine", install_command("online"), ("online",))
RERANKER = Backend("search_r1.search.encoders.cross_encoder", install_command("dense"))
DIAGNOSTICS = Backend(f"{PACKAGE}.diagnostics", reads=("diagnostics",))
BACKENDS = {
    "bm25": Backend(f"{PACKAGE}.bm25", "pip install bm25s"),
    "lucene": LUCENE,
    "google": ONLINE,
    "serpapi": ONLINE,
    "brave": ONLINE,
    "serper": ONLINE,
    "tavily": ONLINE,
    "empty": DIAGNOSTICS,
    "random": DIAGNOSTICS,
    "oracle": DIAGNOSTICS,
    "replay": Backend(f"{PACKAGE}.replay", reads=("diagnostics",)),
}
"""By --retriever_name; any other name is a dense index."""


def build_retriever(config: RetrieverConfig) -> Retriever:
    """Open the backend that `config` names; raises a SearchError that says what to fix."""
    chosen, settings, scorer = _choose(config), config.rerank, None
    if unread := _unread(config, chosen):
        logger.warning(
            "--retriever_name %s does not read %s: leave them out, or choose the backend that does "
            "(--retriever_name, --dense_engine, --reranker_model)",
            *(config.retriever_name, ", ".join(unread)),
        )
    backend = _load(chosen)
    if settings.reranker_model is not None:  # before an index that takes minutes
        scorer = _load(RERANKER, "--reranker_model").CrossEncoder.open(settings)
    retriever: Retriever = backend.open_retriever(config)
    if scorer is not None:
        retriever = RerankingRetriever(retriever, scorer, settings.retrieval_topk)
    return retriever


def _choose(config: RetrieverConfig) -> Backend:
    """The backend of the settings; `bm25` with the folder of a Lucene index is Lucene's."""
    name = config.retriever_name
    if name == "bm25" and config.index_path and lucene_folder(Path(config.index_path)):
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


def _unread(config: RetrieverConfig, backend: Backend) -> list[str]:
    """The flags that were given for another backend, and are without effect."""
    reads = (*backend.reads, "rerank") if config.rerank.reranker_model else backend.reads
    groups = [value for name, value in vars(config).items() if name not in reads]
    return [
        f"--{field.name}"
        for group in groups
        if is_dataclass(group)
        for field in fields(group)
        if getattr(group, field.name) != field.default
    ]


def _load(backend: Backend, who: str = "this backend") -> ModuleType:
    try:
        return importlib.import_module(backend.module)
    except ImportError as error:
        raise SetupError(f"{error}, which {who} needs; install it: {backend.install}") from error


def lucene_folder(path: Path) -> Path | None:
    """The folder with Lucene's segments: `path` or the `bm25` inside it; None without any."""
    return next((one for one in (path, path / "bm25") if any(one.glob("segments_*"))), None)
