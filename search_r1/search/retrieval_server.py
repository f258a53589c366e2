"""The retrieval server: `POST /retrieve`, `GET /health`, `GET /info` over any engine.

Searches run one at a time in one worker thread, since an index need not be thread-safe; the event
loop only parses and writes. Engines live in `retrievers`, the contract in `schema`.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from search_r1.search.errors import SearchError, SetupError
from search_r1.search.options import add_flags, read_flags
from search_r1.search.retrievers.base import Retriever
from search_r1.search.retrievers.registry import build_retriever
from search_r1.search.retrievers.settings import PARTS, RetrieverConfig
from search_r1.search.schema import Health, RetrieveRequest, RetrieveResponse, to_wire

logger = logging.getLogger(__name__)

DEFAULT_TOPK = 3
KEEP_ALIVE_S = 75


class SearchWorker:
    """The only thread that touches the engine: it searches and writes answers, in turn."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")

    async def answer(self, queries: list[str], topk: int, return_scores: bool) -> bytes:
        """The JSON answer to one request."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._run, queries, topk, return_scores)

    def _run(self, queries: list[str], topk: int, return_scores: bool) -> bytes:
        hits = self._retriever.search(queries, topk) if queries else []
        return json.dumps(to_wire(hits, return_scores), ensure_ascii=False).encode()


def create_app(retriever: Retriever, default_topk: int = DEFAULT_TOPK) -> FastAPI:
    """The application that serves `retriever`; `default_topk` stands in for a null topk."""
    app = FastAPI(title="Search-R1 retriever")
    worker = SearchWorker(retriever)

    @app.post("/retrieve", response_model=RetrieveResponse)
    async def retrieve(request: RetrieveRequest) -> Response:
        """Search every query; documents come back best first."""
        topk = default_topk if request.topk is None else request.topk
        body = await worker.answer(request.queries, topk, request.return_scores)
        return Response(body, media_type="application/json")

    @app.get("/health")
    async def health() -> Health:
        """Answers once the index is loaded."""
        count = retriever.num_documents
        return Health(status="ok", retriever=retriever.name, num_documents=count)

    @app.get("/info")
    async def info() -> dict[str, Any]:
        """What is served: engine, corpus and encoder."""
        return {"retriever": retriever.name, "default_topk": default_topk, **retriever.info()}

    app.add_exception_handler(RequestValidationError, _refuse)
    app.add_exception_handler(SearchError, _fail)
    return app


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """422 that says where and why, without the input (it may not even be valid Unicode)."""
    assert isinstance(error, RequestValidationError)
    detail = [{"loc": list(e["loc"]), "msg": e["msg"], "type": e["type"]} for e in error.errors()]
    return JSONResponse({"detail": detail}, status_code=422)


async def _fail(request: Request, error: Exception) -> JSONResponse:
    logger.error("search failed: %s", error)
    return JSONResponse({"detail": str(error)}, status_code=500)


class _Server(uvicorn.Server):
    """A uvicorn server that writes its port to a file once it accepts requests."""

    def __init__(self, config: uvicorn.Config, port_file: Path | None, port: int) -> None:
        super().__init__(config)
        self._port_file = port_file
        self._port = port

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then write the port."""
        await super().startup(sockets=sockets)
        if self._port_file is not None and self.started:
            temporary = self._port_file.with_name(f".{self._port_file.name}.{os.getpid()}")
            temporary.write_text(f"{self._port}\n")
            temporary.replace(self._port_file)


def serve(app: FastAPI, bound: socket.socket, port_file: Path | None = None) -> None:
    """Serve `app` on a bound socket until SIGINT or SIGTERM; accepted requests are finished."""
    host, port = bound.getsockname()[:2]
    logger.info("serving on http://%s:%d", host, port)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_S
    )
    with contextlib.suppress(KeyboardInterrupt):
        _Server(config, port_file, port).run(sockets=[bound])


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening; raises SetupError if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise SetupError(
            f"cannot serve on {host}:{port} ({error}); expected a free port of this machine: "
            "give another --port, or --port 0 for any free one"
        ) from error
    return bound


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="retrieval_server", description=__doc__)
    add = parser.add_argument
    add("--topk", type=int, default=DEFAULT_TOPK, help="documents for a request without topk")
    add("--host", default="127.0.0.1", help="address to bind to")
    add("--port", type=int, default=8000, help="0 picks a free port")
    add("--port_file", type=Path, help="file that receives the port once requests are accepted")
    for options in (RetrieverConfig, *PARTS.values()):
        add_flags(parser, options)
    return parser


def _run(args: argparse.Namespace) -> None:
    if args.topk < 1:
        raise SetupError(f"--topk {args.topk}; expected 1 or more")
    bound = bind(args.host, args.port)
    parts: dict[str, Any] = {name: read_flags(options, args) for name, options in PARTS.items()}
    config = dataclasses.replace(read_flags(RetrieverConfig, args), **parts)
    retriever = build_retriever(config)
    logger.info("%s: %d documents", retriever.name, retriever.num_documents)
    serve(create_app(retriever, args.topk), bound, args.port_file)


def main(argv: list[str] | None = None) -> int:
    """Command-line entry; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except SearchError as error:
        sys.stderr.write(f"retrieval_server: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
