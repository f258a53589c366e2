"""The retrieval server: searches a corpus with any engine, for many clients at once."""

import functools
import logging
from collections.abc import Callable

from fastapi import FastAPI

from search_r1.bearer import read_token
from search_r1.retrieval.engines.base import Retriever
from search_r1.retrieval.engines.registry import build_retriever
from search_r1.retrieval.errors import SetupError
from search_r1.retrieval.schema import TOKEN_VARIABLE, Document
from search_r1.retrieval.service.app import create_app
from search_r1.retrieval.service.metrics import Metrics
from search_r1.retrieval.service.running import bind, leave, serve, warn_if_open
from search_r1.retrieval.settings import ServerOptions

__all__ = ["bind", "create_app", "run", "serve"]

logger = logging.getLogger(__name__)


def run(options: ServerOptions) -> int:
    """Serve with these options until SIGINT or SIGTERM, and return the exit code."""
    options.service.check()
    options.faults.check()
    with bind(options.host, options.port, options.port_file) as bound:
        warn_if_open(bound, read_token(TOKEN_VARIABLE))
        if options.workers > 1:
            from search_r1.retrieval.service.workers import supervise  # noqa: PLC0415 by option

            return supervise(options, bound, open_app)
        app = open_app(options)
        is_idle = serve(app, bound, options.port_file, options.allowed_hosts)
    return leave(is_idle)


def open_app(options: ServerOptions, counts: Metrics | None = None) -> FastAPI:
    """Open the engine and return the application that serves it; raises SetupError."""
    service, faults = options.service, options.faults
    try:
        retriever = build_retriever(options.retriever)
    except OSError as error:
        raise SetupError(
            f"{error}; expected readable files and folders: correct their permissions"
        ) from error
    if retriever.num_threads == 1:  # a local index: load it before the first request
        retriever.search(["warm up"], service.topk)
    logger.info("%s: %d documents", retriever.name, retriever.num_documents)
    find = _document_finder(retriever, options.retriever.corpus_path)
    token = read_token(TOKEN_VARIABLE)
    app = create_app(retriever, service, token=token, find=find, counts=counts)
    if faults.is_on:
        from search_r1.retrieval.service.faults import FaultInjector  # noqa: PLC0415 by option

        logger.warning("TEST FAULTS: requests fail on purpose: %s", faults)
        app.add_middleware(FaultInjector, config=faults)
    return app


def _document_finder(
    retriever: Retriever, corpus_path: str | None
) -> Callable[[str], Document | None] | None:
    """Return what finds documents by id, in the backend's corpus or else the configured one."""
    corpus = getattr(retriever, "corpus", None)
    if corpus is not None and hasattr(corpus, "documents"):
        return functools.partial(corpus.find)
    if corpus_path is None:
        return None
    from search_r1.retrieval.side_corpus import document_finder  # noqa: PLC0415 if no engine's

    return document_finder(corpus_path)
