"""Registry of the retriever backends by `--retriever_name`: built in, or `path/file.py:Name`.

An entry names a module with a function `open_retriever(config) -> Retriever`. The module is
imported only when its backend is chosen, so that only its users need the packages it imports. A
user's `Name` is called the same way.
"""

import importlib
import logging
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.errors import SetupError, install_command
from search_r1.retrieval.settings import RetrieverConfig
from verl.errors import did_you_mean, explain
from verl.plugins import is_path

logger = logging.getLogger(__name__)

Opener = Callable[[RetrieverConfig], Retriever]
OPTION = "--retriever_name"
PACKAGE = "search_r1.retrieval.engines"


class Backend(NamedTuple):
    """An entry of the registry."""

    module: str
    """Full name of the module."""
    install: str = ""
    """Command that installs the packages that the module imports."""
    reads: tuple[str, ...] = ()
    """Names of the option groups of `RetrieverConfig` that the backend reads."""


FAISS = Backend(f"{PACKAGE}.faiss_index", install_command("dense"), ("encoder", "faiss"))
TORCH = Backend(f"{PACKAGE}.torch_flat", install_command("dense"), ("encoder", "torch"))
LUCENE = Backend(f"{PACKAGE}.lucene", install_command("lucene"))
ONLINE = Backend("search_r1.online.engine", install_command("online"), ("online",))
MILVUS = Backend(f"{PACKAGE}.milvus", install_command("milvus"), ("encoder", "faiss", "online"))
ELASTIC = Backend(f"{PACKAGE}.elastic", install_command("dense"), MILVUS.reads)
RERANKER = Backend(f"{PACKAGE}.rerank", install_command("dense"))
HYBRID = Backend(f"{PACKAGE}.hybrid", install_command("dense"),
                 ("encoder", "faiss", "torch", "fusion"))  # fmt: skip
OWN = Backend(f"{PACKAGE}.user_file")
DIAGNOSTICS = Backend(f"{PACKAGE}.diagnostics", reads=("diagnostics",))
BACKENDS = {
    "bm25": Backend(f"{PACKAGE}.bm25", "pip install bm25s"),
    "lucene": LUCENE,
    "milvus": MILVUS,
    "elastic": ELASTIC,
    "opensearch": ELASTIC,
    **dict.fromkeys(("google", "serpapi", "brave", "serper", "tavily"), ONLINE),
    **dict.fromkeys(("empty", "random", "oracle"), DIAGNOSTICS),
    "replay": Backend(f"{PACKAGE}.replay", reads=("diagnostics",)),
}
"""Backends by --retriever_name; any other name is a dense index, or a backend in a user's file."""


def build_retriever(config: RetrieverConfig) -> Retriever:
    """Open the configured backend; raises a SearchError that says what to fix."""
    is_own = is_path(config.retriever_name)
    open_retriever = _import(OWN).opener(config) if is_own else _built_in(config)
    if config.rerank.reranker_model is None:
        return open_retriever(config)
    # Open the reranker first, since opening an index can take minutes.
    reranked = _import(RERANKER, "--reranker_model").open_reranker(config.rerank)
    built: Retriever = reranked(open_retriever(config))
    return built


def _built_in(config: RetrieverConfig) -> Opener:
    """Return the function that opens the configured backend; warn of flags that it ignores."""
    backend = _choose(config)
    if unread := _unread_flags(config, backend):
        logger.warning(
            "--retriever_name %s does not read %s: leave them out, or choose the backend that does "
            "(--retriever_name, --dense_engine, --reranker_model)",
            config.retriever_name,
            ", ".join(unread),
        )
    open_retriever: Opener = _import(backend).open_retriever
    return open_retriever


def open_part(config: RetrieverConfig) -> Retriever:
    """Open the configured backend as a part of another, without reranker and warnings."""
    part: Retriever = _import(_choose(config)).open_retriever(config)
    return part


def _choose(config: RetrieverConfig) -> Backend:
    """Return the configured backend; `bm25` with the folder of a Lucene index is `lucene`."""
    name = config.retriever_name
    if name == "bm25" and config.index_path and lucene_folder(Path(config.index_path)):
        return LUCENE
    if name in BACKENDS:
        return BACKENDS[name]
    if "+" in name:
        return HYBRID
    if config.encoder.retriever_model is None:
        otherwise = "give a dense index its --retriever_model, such as intfloat/e5-base-v2"
        expected = f"one of {', '.join(BACKENDS)}, path/file.py:Name, or a name and an encoder"
        raise SetupError(explain(OPTION, name, expected, did_you_mean(name, BACKENDS, otherwise)))
    dense = {"faiss": FAISS, "torch": TORCH}
    if config.torch.dense_engine not in dense:
        raise SetupError(f"--dense_engine {config.torch.dense_engine}; expected faiss or torch")
    return dense[config.torch.dense_engine]


def _unread_flags(config: RetrieverConfig, backend: Backend) -> list[str]:
    """Return the flags that were set but that this backend does not read."""
    reads = (*backend.reads, "rerank") if config.rerank.reranker_model else backend.reads
    groups = [value for name, value in vars(config).items() if name not in reads]
    return [
        f"--{field.name}"
        for group in groups
        if is_dataclass(group)
        for field in fields(group)
        if getattr(group, field.name) != field.default
    ]


def _import(backend: Backend, user: str = "this backend") -> ModuleType:
    try:
        return importlib.import_module(backend.module)
    except ImportError as error:
        is_ours = (error.name or "").partition(".")[0] == "search_r1"
        fix = "restore it in this checkout" if is_ours else f"install it: {backend.install}"
        raise SetupError(f"{error}, which {user} needs; {fix}") from error


def lucene_folder(path: Path) -> Path | None:
    """Return the folder with Lucene's segments, `path` or the `bm25` inside it, or None."""
    return next((f for f in (path, path / "bm25") if any(f.glob("segments_*"))), None)
