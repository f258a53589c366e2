"""The web application: `POST /retrieve`, the GET routes, and the search page at `/`."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from search_r1.bearer import has_token
from search_r1.retrieval.engines.base import Filter, Retriever
from search_r1.retrieval.errors import DeadlineExceeded, Overloaded, SearchError
from search_r1.retrieval.schema import Document, fingerprint, well_formed
from search_r1.retrieval.service.answers import (
    DocumentResponse,
    Health,
    RetrieveResponse,
    response_chunks,
)
from search_r1.retrieval.service.batching import Batcher, PendingRequest
from search_r1.retrieval.service.metrics import Metrics
from search_r1.retrieval.service.pages import PAGE_FILES, page_routes
from search_r1.retrieval.service.requests import (
    STATUSES,
    Problem,
    RetrieveRequest,
    as_response,
    http_error,
    parse,
    read_body,
    request_model,
    unauthorized,
)
from search_r1.retrieval.settings import ServiceConfig

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499
"""Conventional status, for metrics only, of a request whose client has disconnected."""
CHUNK_DOCUMENTS = 2000
"""Documents in a chunk of a response, since serializing half a gigabyte (4,096 queries, topk 100)
at once would make all other requests wait."""
PAGE = [Path(__file__).parent / name for name in PAGE_FILES]
LIMITS = ("max_topk", "max_queries", "max_query_chars", "max_body_bytes", "max_pending", "deadline")


class Service:
    """Answers requests with one backend, until `drain` is called."""

    def __init__(
        self, retriever: Retriever, config: ServiceConfig, token: str | None, metrics: Metrics
    ) -> None:
        """Opens the cache file; raises StorageError if this fails."""
        config.check()
        self.config = config
        self.request_model = request_model(config)
        self.is_draining = False
        self._token = token
        self.metrics = metrics
        self.limits = {name: getattr(config, name) for name in LIMITS}
        """Limits for `/info`; what runs the service adds its own."""
        self.metrics.watch_cuts(getattr(retriever, "cuts", ()))
        self._open = ExitStack()
        self.engine = retriever
        self.retriever = (
            self._kept(retriever, config.cache_path) if config.cache_path else retriever
        )
        self.batcher = Batcher(self.retriever, config, self.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.retrieve(Request(scope, receive))
        if response.status_code != CLIENT_CLOSED:
            await response(scope, receive, send)

    async def retrieve(self, request: Request) -> Response:
        """Return the documents of every query, best first, in the order of the queries."""
        start = time.perf_counter()
        try:
            response = await self._respond(request, start)
            self.metrics.latency.observe(time.perf_counter() - start)
        except HTTPException as error:
            response = as_response(error)
        except SearchError as error:
            response = as_response(http_error(error))
            if response.status_code == 500:
                logger.error("search failed: %s", error)
        except ClientDisconnect:
            response = Response(status_code=CLIENT_CLOSED)
        self.metrics.requests.labels(str(response.status_code)).inc()
        return response

    async def health(self) -> Health:
        """Return 200 while searches can be answered; needs no token."""
        if self.is_draining:
            raise http_error(Overloaded("the server is stopping", 1.0))
        backend = self.retriever
        return Health(status="ok", retriever=backend.name, num_documents=backend.num_documents)

    def check_token(self, request: Request) -> None:
        """Raise a 401 if the server has a token and the request does not."""
        if self._token and not has_token(request.headers.get("Authorization", ""), self._token):
            raise unauthorized()

    async def info(self) -> dict[str, Any]:
        """Return facts about the backend, the limits, and the memory in bytes."""
        facts = self.retriever.info()
        return {
            "retriever": self.retriever.name,
            "num_documents": self.retriever.num_documents,
            "default_topk": self.config.topk,
            "fingerprint": fingerprint(facts),
            "filter_fields": list(getattr(self.retriever, "filter_fields", ())),
            "limits": self.limits,
            "memory": _resident_bytes(),
            **facts,
        }

    def drain(self) -> None:
        """Refuse new requests; accepted ones have `config.drain` seconds to finish."""
        self.is_draining = True
        error = Overloaded("the server is stopping", 1.0)
        asyncio.get_running_loop().call_later(self.config.drain, self.batcher.fail_all, error)

    def close(self) -> bool:
        """Close the cache file; return whether no search is still running."""
        is_idle = self.batcher.shut_down()
        self._open.close()  # a search that is still running fails to write; nobody needs it
        return is_idle

    def _kept(self, retriever: Retriever, path: str) -> Retriever:
        """Return the backend with its results kept in a file."""
        from search_r1.retrieval.engines.kept import open_kept  # noqa: PLC0415 by option

        return self._open.enter_context(open_kept(retriever, path, self.metrics.file_hits.inc))

    async def _respond(self, request: Request, start: float) -> Response:
        self.check_token(request)
        if self.is_draining:
            raise Overloaded("the server is stopping; use another one, or retry later", 1.0)
        config = self.config
        body = await read_body(request, config.max_body_bytes, config.deadline)
        parsed = parse(body, self.request_model)
        if parsed.model_extra:
            from search_r1.retrieval.service import unknown_fields  # noqa: PLC0415 - as needed

            unknown_fields.refuse_misspelt_fields(parsed)
        seconds = min(config.deadline, parsed.deadline_s or config.deadline)
        filter = self._read_filter(parsed) if parsed.filter or parsed.filters else ()
        pending = self.batcher.submit(parsed.queries, parsed.topk or config.topk, filter)
        try:
            if pending.jobs:
                await _wait(pending, request, seconds, start)
        finally:
            self.batcher.release(pending)
        results = [pending.results[query] for query in parsed.queries]
        headers = {"Server-Timing": self._timing(pending, start)}
        longest = max(map(len, results), default=0)
        num_queries = max(1, CHUNK_DOCUMENTS // max(1, longest))
        chunks = response_chunks(results, parsed.return_scores, num_queries)
        if sum(map(len, results)) <= CHUNK_DOCUMENTS:
            return Response(b"".join(chunks), headers=headers, media_type="application/json")
        return StreamingResponse(_stream(chunks), headers=headers, media_type="application/json")

    def _read_filter(self, request: RetrieveRequest) -> Filter:
        from search_r1.retrieval.service.filtering import read_filter  # noqa: PLC0415 by request

        return read_filter(request, getattr(self.retriever, "filter_fields", ()))

    def _timing(self, pending: PendingRequest, start: float) -> str:
        stages = pending.stage_seconds()
        if stages:
            self.metrics.queue_wait.observe(stages["queue"])
        parts = [f"{name};dur={1000 * s:.3f}" for name, s in stages.items()] or ["cache;desc=hit"]
        return ", ".join([*parts, f"total;dur={1000 * (time.perf_counter() - start):.3f}"])


def _resident_bytes() -> dict[str, int]:
    """Return the bytes of this process's own memory and of its mapped files (shareable pages)."""
    info = psutil.Process().memory_info()
    mapped = int(getattr(info, "shared", 0))  # reported on Linux only
    return {"own": int(info.rss) - mapped, "mapped": mapped}


async def _wait(pending: PendingRequest, request: Request, seconds: float, start: float) -> None:
    """Wait for the results; raises DeadlineExceeded `seconds` after `start`, ClientDisconnect."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(wait_for_disconnect())
    watch.add_done_callback(lambda _: pending.fail(ClientDisconnect()))
    try:
        async with asyncio.timeout(seconds - (time.perf_counter() - start)):
            await pending.done
    except TimeoutError as error:
        raise DeadlineExceeded(f"no result within the allowed {seconds:g} s") from error
    finally:
        watch.cancel()


async def _stream(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
        await asyncio.sleep(0)  # let other requests run, even if the client reads fast


async def _answer_error(request: Request, error: SearchError) -> Response:
    return as_response(http_error(error))


def create_app(
    retriever: Retriever,
    config: ServiceConfig = ServiceConfig(),  # noqa: B008 (frozen)
    *,
    token: str | None = None,
    find: Callable[[str], Document | None] | None = None,
    counts: Metrics | None = None,
) -> FastAPI:
    """Create the application that serves `retriever`; its Service is at `app.state.service`.

    `token`: required from every client, unless None. `find`: returns the document with an id, for
    `GET /document`; None: the server has no corpus. `counts`: where to count, None for anew.
    Raises SetupError.
    """
    service = Service(retriever, config, token, counts or Metrics())
    guard = [Depends(service.check_token)]
    unauthorized: dict[int | str, Any] = {401: {"model": Problem}}
    app = FastAPI(title="Search-R1 retriever", docs_url=None, redoc_url=None)  # they load scripts
    app.state.service = service
    # FastAPI's request handling takes twice as long as a cached search. This plain route comes
    # first; FastAPI's below is for OpenAPI only.
    app.router.routes.insert(0, Route("/retrieve", service, methods=["POST"]))
    app.router.routes.extend(page_routes(PAGE))
    app.get("/health", responses={503: {"model": Problem}})(service.health)
    app.get("/info", responses=unauthorized, dependencies=guard)(service.info)
    body = {"application/json": {"schema": service.request_model.model_json_schema()}}
    app.post(
        "/retrieve",
        response_model=RetrieveResponse,
        responses={code: {"model": Problem, "description": s} for code, s in STATUSES.items()},
        openapi_extra={"requestBody": {"required": True, "content": body}},
    )(service.retrieve)

    app.exception_handler(SearchError)(_answer_error)
    missing: dict[int | str, Any] = {404: {"model": Problem}, **unauthorized}

    @app.get("/document", responses=missing, dependencies=guard)
    def document(id: str) -> DocumentResponse:
        """Return one document by its id, as in `/retrieve`."""
        result = None if find is None else find(id)
        if result is None:
            reason = "has no corpus file" if find is None else f"has no document {id!r}"
            raise HTTPException(404, well_formed(f"this server {reason}"))
        return DocumentResponse(document=asdict(result))

    @app.api_route(
        "/page/{name}", methods=["GET", "POST"], include_in_schema=False, dependencies=guard
    )
    async def page_question(name: str, request: Request) -> Any:
        from search_r1.retrieval.service.page_answers import answer  # noqa: PLC0415 by the page

        return await answer(service, name, request)

    @app.get("/metrics", response_class=Response, responses=unauthorized, dependencies=guard)
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return app
