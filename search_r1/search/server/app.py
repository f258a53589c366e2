"""The application: `POST /retrieve`, its GET routes, and the page at `/`."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from search_r1.bearer import has_token
from search_r1.search.backends.base import Retriever, fingerprint
from search_r1.search.errors import DeadlineExceeded, Overloaded, SearchError
from search_r1.search.memory import resident
from search_r1.search.recording import Recorder
from search_r1.search.schema import (
    Document,
    DocumentResponse,
    Health,
    RetrieveResponse,
    response_chunks,
    well_formed,
)
from search_r1.search.server.batching import Batcher, Claim, Searcher, open_store
from search_r1.search.server.metrics import Metrics
from search_r1.search.server.pages import page_routes
from search_r1.search.server.requests import (
    STATUSES,
    Problem,
    as_response,
    http_error,
    limited,
    parse,
    read_body,
    without_token,
)
from search_r1.search.settings import ServiceConfig

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499
"""What is counted, by convention, where nobody waits for an answer any more."""
WHOLE = 2000
"""Documents of an answer that is written at once; a longer one goes in such parts. Else half a
gigabyte (one query 4,096 times, topk 100) would be made while all others wait."""
FOLDER = Path(__file__).parent
LIMITS = ("max_topk", "max_queries", "max_query_chars", "max_body_bytes", "max_pending", "deadline")


class Service:
    """Answers requests with one engine until it is told to drain."""

    def __init__(
        self,
        retriever: Retriever,
        config: ServiceConfig,
        recorder: Recorder | None,
        token: str | None,
    ) -> None:
        """Opens the cache file; raises SetupError if it cannot."""
        config.check()
        self.retriever = retriever
        self.config = config
        self.request_model = limited(config)
        self.is_draining = False
        self._token = token
        self.metrics = Metrics()
        disk = open_store(config.cache_path, "--cache_path") if config.cache_path else None
        self._searcher = Searcher(retriever, disk, recorder)
        self.batcher = Batcher(self._searcher, retriever.num_threads, config, self.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /retrieve`, as an application of its own."""
        answer = await self.retrieve(Request(scope, receive))
        if answer.status_code != CLIENT_CLOSED:
            await answer(scope, receive, send)

    async def retrieve(self, request: Request) -> Response:
        """The documents of every query, best first, in the order of the queries."""
        start = time.perf_counter()
        try:
            answer = await self._answer(request, start)
            self.metrics.latency.observe(time.perf_counter() - start)
        except HTTPException as error:
            answer = as_response(error)
        except SearchError as error:
            answer = as_response(http_error(error))
            if answer.status_code == 500:
                logger.error("search failed: %s", error)
        except ClientDisconnect:
            answer = Response(status_code=CLIENT_CLOSED)
        self.metrics.requests.labels(str(answer.status_code)).inc()
        return answer

    async def health(self) -> Health:
        """200 while searches can be answered; open to everyone."""
        if self.is_draining:
            raise http_error(Overloaded("the server is stopping", 1.0))
        engine = self.retriever
        return Health(status="ok", retriever=engine.name, num_documents=engine.num_documents)

    def check_token(self, request: Request) -> None:
        """Raise a 401 for a request without the token, where there is one."""
        if self._token and not has_token(request.headers.get("Authorization", ""), self._token):
            raise without_token()

    async def info(self) -> dict[str, Any]:
        """What is served, what is allowed, and the bytes of memory that it takes."""
        limits, facts = asdict(self.config), self.retriever.info()
        return {
            "retriever": self.retriever.name,
            "num_documents": self.retriever.num_documents,
            "default_topk": self.config.topk,
            "fingerprint": fingerprint(facts),
            "limits": {name: limits[name] for name in LIMITS},
            "memory": resident(),
            **facts,
        }

    def drain(self) -> None:
        """Take no more requests; those accepted have `config.drain` seconds."""
        self.is_draining = True
        late = Overloaded("the server is stopping", 1.0)
        asyncio.get_running_loop().call_later(self.config.drain, self.batcher.fail_all, late)

    def close(self) -> bool:
        """Finish what is to be written; whether no search was left running."""
        is_idle = self.batcher.shut_down()
        self._searcher.close()  # a search that goes on finds closed files: nobody waits for it
        return is_idle

    async def _answer(self, request: Request, start: float) -> Response:
        self.check_token(request)
        if self.is_draining:
            raise Overloaded("the server is stopping; ask another one, or again later", 1.0)
        config = self.config
        body = await read_body(request.receive, config.max_body_bytes, config.deadline)
        asked = parse(body, self.request_model)
        seconds = min(self.config.deadline, asked.deadline_s or self.config.deadline)
        claim = self.batcher.open(asked.queries, asked.topk or self.config.topk)
        try:
            if claim.jobs:
                await _wait(claim, request, seconds, start)
        finally:
            self.batcher.close(claim)
        hits = [claim.found[query] for query in asked.queries]
        headers = {"Server-Timing": self._timing(claim, start)}
        longest = max(map(len, hits), default=0)
        parts = response_chunks(hits, asked.return_scores, max(1, WHOLE // max(1, longest)))
        if sum(map(len, hits)) <= WHOLE:
            return Response(b"".join(parts), headers=headers, media_type="application/json")
        return StreamingResponse(_one_by_one(parts), headers=headers, media_type="application/json")

    def _timing(self, claim: Claim, start: float) -> str:
        """The value of `Server-Timing`; milliseconds."""
        stages = claim.stages()
        if stages:
            self.metrics.queue_wait.observe(stages["queue"])
        parts = [f"{name};dur={1000 * seconds:.3f}" for name, seconds in stages.items()]
        parts = parts or ["cache;desc=hit"]
        return ", ".join([*parts, f"total;dur={1000 * (time.perf_counter() - start):.3f}"])


async def _wait(claim: Claim, request: Request, seconds: float, start: float) -> None:
    """Until the results are here, `seconds` after `start` at most; raises ClientDisconnect if the
    client leaves before."""

    async def until_left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(until_left())
    watch.add_done_callback(lambda _: claim.fail(ClientDisconnect()))
    try:
        async with asyncio.timeout(seconds - (time.perf_counter() - start)):
            await claim.done
    except TimeoutError as error:
        text = f"no answer within the {seconds:g} s that were allowed"
        raise DeadlineExceeded(text) from error
    finally:
        watch.cancel()


async def _one_by_one(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
        await asyncio.sleep(0)  # a client that reads fast would keep all others waiting


def create_app(
    retriever: Retriever,
    config: ServiceConfig = ServiceConfig(),  # noqa: B008 (frozen)
    *,
    token: str | None = None,
    recorder: Recorder | None = None,
    find: Callable[[str], Document | None] | None = None,
) -> FastAPI:
    """The application that serves `retriever`; its Service is at `app.state.service`.

    `token`: wanted from every client; None: everyone may ask. `find`: the document of an id, for
    `GET /document`; None: this server knows none. Raises SetupError.
    """
    service = Service(retriever, config, recorder, token)
    guard = [Depends(service.check_token)]
    unauthorized: dict[int | str, Any] = {401: {"model": Problem}}
    app = FastAPI(title="Search-R1 retriever", docs_url=None, redoc_url=None)  # these load scripts
    app.state.service = service
    # What FastAPI does for a request took twice as long as a cached search. Its route below is
    # there for OpenAPI; this one, without its dependencies and checks of answers, is found first.
    app.router.routes.insert(0, Route("/retrieve", service, methods=["POST"]))
    app.router.routes.extend(page_routes(sorted(FOLDER.glob("page.*"))))
    app.get("/health", responses={503: {"model": Problem}})(service.health)
    app.get("/info", responses=unauthorized, dependencies=guard)(service.info)
    # for OpenAPI: the route reads its body itself, to bound its size and time
    body = {"application/json": {"schema": service.request_model.model_json_schema()}}
    app.post(
        "/retrieve",
        response_model=RetrieveResponse,
        responses={code: {"model": Problem, "description": s} for code, s in STATUSES.items()},
        openapi_extra={"requestBody": {"required": True, "content": body}},
    )(service.retrieve)

    missing: dict[int | str, Any] = {404: {"model": Problem}, **unauthorized}

    @app.exception_handler(SearchError)
    async def failed(request: Request, error: SearchError) -> Response:
        return as_response(http_error(error))

    @app.get("/document", responses=missing, dependencies=guard)
    def document(id: str) -> DocumentResponse:
        """One document by its id, as `/retrieve` gives it."""
        found = None if find is None else find(id)
        if found is None:
            why = "has no corpus file" if find is None else f"has no document {id!r}"
            raise HTTPException(404, well_formed(f"this server {why}"))
        return DocumentResponse(document=asdict(found))

    @app.get("/metrics", response_class=Response, responses=unauthorized, dependencies=guard)
    async def metrics() -> Response:
        """Figures in Prometheus' text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return app
