"""The application: `POST /retrieve`, its GET routes, and the page at `/`."""

import asyncio
import logging
import time
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from search_r1.search.backends.base import Retriever, fingerprint
from search_r1.search.errors import Overloaded, SearchError, SetupError
from search_r1.search.memory import resident
from search_r1.search.recording import Recorder
from search_r1.search.schema import Health, to_json
from search_r1.search.server.access import Guard
from search_r1.search.server.admission import ClientGone, Refused, TooLarge, parse, read_body
from search_r1.search.server.batching import Batcher, Ticket
from search_r1.search.server.config import ServiceConfig
from search_r1.search.server.metrics import Metrics
from search_r1.search.server.openapi import Problem, describe
from search_r1.search.server.pages import page_routes
from search_r1.search.server.replies import reply
from search_r1.search.server.searching import Searcher
from search_r1.search.server.statuses import failure_of
from search_r1.storage import FileStore, StorageError

logger = logging.getLogger(__name__)

LIMITS = ("max_topk", "max_queries", "max_query_chars", "max_body_bytes", "max_pending", "deadline")


class Service:
    """Answers requests with one engine until it is told to drain."""

    def __init__(
        self, retriever: Retriever, config: ServiceConfig, recorder: Recorder | None
    ) -> None:
        """Opens the cache file; raises SetupError if it cannot."""
        config.check()
        self.retriever = retriever
        self.config = config
        self.is_draining = False
        self.metrics = Metrics()
        self._fingerprint = fingerprint(retriever.info())
        disk = None
        if config.cache_path is not None:
            try:
                disk = FileStore(config.cache_path, "--cache_path")
            except StorageError as error:
                raise SetupError(str(error)) from error
        self._searcher = Searcher(retriever, disk, recorder)
        self.batcher = Batcher(self._searcher, retriever.num_threads, config, self.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /retrieve`."""
        start = time.perf_counter()
        status = 200
        headers: dict[str, str] = {}
        try:
            body, headers = await self._answer(scope, receive, start)
        except (SearchError, TooLarge, Refused) as error:
            failure = failure_of(error, self.config.max_body_bytes)
            if failure.status == 500:
                logger.error("search failed: %s", error)
            status, body, headers = failure.status, failure.body, dict(failure.headers)
        except ClientGone:
            self.metrics.count_request(499)
            return
        self.metrics.count_request(status)
        if status == 200:
            self.metrics.latency.observe(time.perf_counter() - start)
        if self.is_draining:
            headers["Connection"] = "close"
        await reply(send, status, body, headers)

    def info(self) -> dict[str, Any]:
        """What is served, what is allowed, and the bytes of memory that it takes."""
        limits = asdict(self.config)
        return {
            "retriever": self.retriever.name,
            "num_documents": self.retriever.num_documents,
            "default_topk": self.config.topk,
            "fingerprint": self._fingerprint,
            "limits": {name: limits[name] for name in LIMITS},
            "memory": resident(),
            **self.retriever.info(),
        }

    def drain(self) -> None:
        """Take no more requests; those accepted have `config.drain` seconds."""
        if not self.is_draining:
            self.is_draining = True
            late = Overloaded("the server is stopping", 1.0)
            asyncio.get_running_loop().call_later(self.config.drain, self.batcher.fail_all, late)

    def close(self) -> bool:
        """Finish what is to be written; whether no search was left running."""
        is_idle = self.batcher.shut_down()
        if is_idle:
            self._searcher.close()
        return is_idle

    async def _answer(
        self, scope: Scope, receive: Receive, start: float
    ) -> tuple[bytes, dict[str, str]]:
        """Body and headers of a good answer."""
        if self.is_draining:
            raise Overloaded("the server is stopping; ask another one, or again later", 1.0)
        request = parse(await read_body(scope, receive, self.config), self.config)
        topk = self.config.topk if request.topk is None else request.topk
        seconds = min(self.config.deadline, request.deadline_s or self.config.deadline)
        ticket = self.batcher.open(request.queries, topk, seconds)
        try:
            if ticket.jobs:
                await _wait(ticket, receive)
            body = to_json(ticket.hits, request.return_scores)
        finally:
            self.batcher.close(ticket)
        return body, {"Server-Timing": self._timing(ticket, start)}

    def _timing(self, ticket: Ticket, start: float) -> str:
        """The header's value; milliseconds."""
        stages = ticket.stages
        if stages:
            self.metrics.queue_wait.observe(stages["queue"])
        parts = [f"{name};dur={1000 * seconds:.3f}" for name, seconds in stages.items()]
        if not stages:
            parts.append("cache;desc=hit")
        parts.append(f"total;dur={1000 * (time.perf_counter() - start):.3f}")
        return ", ".join(parts)


async def _wait(ticket: Ticket, receive: Receive) -> None:
    """Until the results are here; raises ClientGone if the client leaves before."""
    watch = asyncio.ensure_future(_disconnected(receive))
    watch.add_done_callback(lambda _: ticket.fail(ClientGone()))
    try:
        await ticket.wait()
    finally:
        watch.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def create_app(
    retriever: Retriever,
    config: ServiceConfig = ServiceConfig(),  # noqa: B008 (frozen)
    *,
    token: str | None = None,
    recorder: Recorder | None = None,
) -> FastAPI:
    """The application that serves `retriever`; its Service is at `app.state.service`.

    `token`: wanted from every client; None: everyone may ask. Raises SetupError.
    """
    service = Service(retriever, config, recorder)
    app = FastAPI(title="Search-R1 retriever")
    app.state.service = service
    app.router.routes[:0] = [
        Route("/retrieve", service, methods=["POST"], include_in_schema=False),
        *page_routes(),
    ]
    _add_facts(app, service)
    document = describe(app, config)
    app.openapi = lambda: document  # type: ignore[method-assign]
    if token:
        app.add_middleware(Guard, token=token)
    return app


def _add_facts(app: FastAPI, service: Service) -> None:
    """The routes that answer GET."""

    @app.get("/health", response_model=Health, responses={503: {"model": Problem}})
    async def health() -> Any:
        """200 while searches can be answered; open to everyone."""
        if service.is_draining:
            detail = {"detail": "the server is stopping"}
            return JSONResponse(detail, 503, {"Retry-After": "1"})
        engine = service.retriever
        return Health(status="ok", retriever=engine.name, num_documents=engine.num_documents)

    @app.get("/info", responses={401: {"model": Problem}})
    async def info() -> dict[str, Any]:
        """What is served: engine, fingerprints of corpus and index, encoder, limits."""
        return service.info()

    @app.get("/metrics", response_class=Response, responses={401: {"model": Problem}})
    async def metrics() -> Response:
        """Figures in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")
