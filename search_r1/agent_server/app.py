"""The agent as a process: its routes (chat completions, models, health, the chat page at `/`), a
port, and an orderly end."""

import asyncio
import logging
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from transformers.utils import logging as transformers_logging

from search_r1.agent.generation import find_retrieval
from search_r1.agent_server.answers import ApiError, Envelope, answer_errors, misdirected
from search_r1.agent_server.requests import ChatRequest, Order, read, understand
from search_r1.agent_server.streaming import (
    Listener,
    Thoughts,
    events,
    outcome,
    reasoning,
    unless_left,
)
from search_r1.bearer import has_token
from search_r1.inference.dialogue import SILENCE, AgentSession, DialogueListener, Reply
from search_r1.inference.opening import opened
from search_r1.plain import log
from search_r1.search.client import RetrievalClient
from search_r1.search.errors import RetrieverRefused, RetrieverUnavailable
from search_r1.search.server.connections import configure
from search_r1.search.server.pages import page_routes
from search_r1.search.server.running import (
    bind,
    checked,
    listen,
    read_token,
    warn_if_open,
    write_port,
)
from search_r1.serve import ServingOptions
from verl import __version__

CLIENT_CLOSED = 499
"""What is noted, by convention, where nobody waits for an answer any more."""
VIEW = Path(__file__).parents[1] / "view" / "page"
PAGE = (*sorted((Path(__file__).parent / "page").iterdir()),
        *(VIEW / name for name in ("elements.js", "page.css", "page.svg")))  # fmt: skip
"""Files of the chat page, and what it shares with that of `search-r1 view`."""
_CONTENT = {"application/json": {"schema": ChatRequest.model_json_schema()}}
_BODY = {"requestBody": {"required": True, "content": _CONTENT}}
"""For OpenAPI: the route reads its body itself."""


@dataclass(frozen=True)
class Service:
    """An agent under a name, and the token that it is asked for, if any."""

    session: AgentSession
    name: str
    token: str | None = None
    max_body_bytes: int = ServingOptions.max_body_bytes
    peers: tuple[str, ...] = ()
    """Addresses of other servers: the chat page may ask them, and theirs may ask here."""
    created: int = field(default_factory=lambda: int(time.time()))

    def model(self) -> dict[str, Any]:
        facts = {"created": self.created, "owned_by": "search-r1"}
        return {"id": self.name, "object": "model", **facts}

    def require(self, name: str) -> None:
        if name != self.name:
            message = f"there is no model {name!r}; expected {self.name!r}"
            raise ApiError(404, message, "model_not_found", "model")

    async def admit(self, request: Request) -> None:
        """Raise ApiError for a request without the token."""
        if self.token and not has_token(request.headers.get("authorization", ""), self.token):
            raise ApiError(401, "a wrong API key, or none: send the server's", "invalid_api_key")

    def dialogue(self, order: Order, listener: DialogueListener) -> asyncio.Task[Reply]:
        return asyncio.ensure_future(self.session.ask(
            order.question, order.prompt, listener,
            sampling=order.sampling, seed=order.seed, max_tokens=order.max_tokens,
        ))  # fmt: skip

    async def answer(self, body: ChatRequest) -> Response:
        """What the client gets; a long prompt is rendered beside the event loop."""
        order = await asyncio.to_thread(understand, body, self.session)
        make = self.stream if body.stream else self.whole
        return await make(order, Envelope(self.name))

    async def whole(self, order: Order, envelope: Envelope) -> Response:
        reply = await outcome(self.dialogue(order, SILENCE))
        thinking = reasoning(reply.turns, self._tags, self._special_tokens)
        return JSONResponse(envelope.completion(reply, thinking))

    async def stream(self, order: Order, envelope: Envelope) -> Response:
        """A stream, begun with its first delta, so that an early error has a status of its own."""
        thoughts = Thoughts(self._tags, self._special_tokens)
        listener = Listener(thoughts, order.brings.include_documents)
        work = self.dialogue(order, listener)
        work.add_done_callback(lambda _: listener.close())
        try:
            first = await listener.next()
            if first is None:
                await outcome(work)
        except BaseException:
            work.cancel()
            raise
        parts = events(envelope, first, listener, work, order.brings.include_usage)
        return StreamingResponse(parts, media_type="text/event-stream")

    async def check_health(self) -> None:
        """Raise ApiError when no search could be answered."""
        retrieval = find_retrieval(self.session.agent.environment)
        if not isinstance(retrieval, RetrievalClient):
            return
        try:
            await retrieval.health()
        except RetrieverRefused:
            return  # a server of another make has no /health, but it answers
        except RetrieverUnavailable as error:
            raise ApiError(503, str(error), "retriever_unavailable") from error

    @property
    def _tags(self) -> Any:
        return self.session.agent.format.tags

    @property
    def _special_tokens(self) -> list[str]:
        return self.session.agent.tokenizer.all_special_tokens


def build_app(service: Service) -> FastAPI:
    app = FastAPI(title="Search-R1 agent", version=__version__, docs_url=None, redoc_url=None)
    answer_errors(app)
    app.include_router(_guarded(service))
    app.router.routes.extend(page_routes(PAGE, service.peers))
    if service.peers:
        headers = ["Authorization", "Content-Type"]
        app.add_middleware(CORSMiddleware, allow_origins=service.peers, allow_headers=headers,
                           allow_methods=["GET", "POST"])  # fmt: skip

    @app.get("/health")
    async def health() -> dict[str, str]:
        await service.check_health()
        return {"status": "ok", "model": service.name}

    @app.get("/peers", include_in_schema=False)
    async def peers() -> tuple[str, ...]:
        return service.peers

    return app


def _guarded(service: Service) -> APIRouter:
    """What wants the token, where there is one."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(service.admit)])

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model()]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.require(name)
        return service.model()

    # The body is no parameter: FastAPI would read all of it before it looks at the token.
    @router.post("/chat/completions", response_model=None, openapi_extra=_BODY)
    async def chat(request: Request) -> Response:
        try:
            body = await read(request.receive, service.max_body_bytes)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        service.require(body.model)
        return await unless_left(request, service.answer(body)) or Response(
            status_code=CLIENT_CLOSED
        )

    return router


logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "AGENT_TOKEN"
GRACE_S = 8
"""Seconds that dialogues are given to end when the service is told to."""


async def serve(options: ServingOptions, bound: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM. Raises UserError when the agent cannot be opened."""
    token = read_token(TOKEN_VARIABLE)
    warn_if_open(bound, token, f"set {TOKEN_VARIABLE}")
    async with opened(options) as session:
        service = Service(session, options.name, token, options.max_body_bytes, options.chat_peers)
        app = build_app(service)
        guarded = checked(app, bound.getsockname()[0], options.allowed_hosts, misdirected)
        server = uvicorn.Server(configure(guarded, options.max_body_bytes, GRACE_S))
        address = listen(bound)
        # uvicorn raises the signal again once it is done, which would cut short the closing of
        # the engine.
        for ending in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ending, signal.SIG_IGN)
        running = asyncio.ensure_future(server.serve(sockets=[bound]))
        while not server.started and not running.done():
            await asyncio.sleep(0.05)
        told = "%s answers at http://%s/v1; chat page: http://%s"
        logger.info(told, options.name, address, address)
        if options.port_file is not None:
            write_port(options.port_file, bound.getsockname()[1])
        await running


def start(options: ServingOptions) -> int:
    """Serve; returns the exit code. Raises UserError or SetupError for a user's mistake."""
    log(logging.INFO, "%(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "vllm"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    with bind(options.host, options.port, options.port_file) as bound:
        asyncio.run(serve(options, bound))
    return 0
