"""The agent server: chat completions, models, health, the chat page at `/`, startup, shutdown."""

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
from huggingface_hub.utils.tqdm import disable_progress_bars
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from search_r1.agent.generation import find_retrieval
from search_r1.agent_server.requests import (
    AgentRequest,
    ChatRequest,
    read_request,
    to_agent_request,
)
from search_r1.agent_server.responses import ApiError, Envelope, add_error_handlers
from search_r1.agent_server.streaming import (
    ReasoningFilter,
    StreamListener,
    events,
    extract_reasoning,
    run_until_disconnect,
    wait_for_reply,
)
from search_r1.bearer import has_token, read_token
from search_r1.inference.dialogue import SILENCE, AgentSession, DialogueListener, Reply
from search_r1.inference.ending import exits_at_signals
from search_r1.inference.opening import open_session
from search_r1.plain import configure_logging
from search_r1.retrieval.client import RetrievalClient
from search_r1.retrieval.errors import RetrieverRefused, RetrieverUnavailable
from search_r1.retrieval.service.pages import page_routes
from search_r1.retrieval.service.running import (
    bind,
    configure,
    listen,
    warn_if_open,
    write_port,
)
from search_r1.serve import ServingOptions
from verl import __version__

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "AGENT_TOKEN"
GRACE_S = 8
"""Seconds that running dialogues may take to finish at shutdown."""
CLIENT_CLOSED = 499
"""Conventional status (from nginx) for a client that closed the connection; nobody receives it."""
PAGE = sorted((Path(__file__).parent / "page").iterdir())
_CONTENT = {"application/json": {"schema": ChatRequest.model_json_schema()}}
_BODY = {"requestBody": {"required": True, "content": _CONTENT}}
"""OpenAPI description of the request body, which the route reads itself."""


@dataclass(frozen=True)
class AgentService:
    """An agent that is served as a model with a name, and the token that clients must send."""

    session: AgentSession
    name: str
    token: str | None = None
    max_body_bytes: int = ServingOptions.max_body_bytes
    peers: tuple[str, ...] = ()
    """Addresses of other agent servers; the chat pages of these servers may call each other."""
    created: int = field(default_factory=lambda: int(time.time()))

    def model(self) -> dict[str, Any]:
        facts = {"created": self.created, "owned_by": "search-r1"}
        return {"id": self.name, "object": "model", **facts}

    def require_model(self, name: str) -> None:
        if name != self.name:
            message = f"there is no model {name!r}; expected {self.name!r}"
            raise ApiError(404, message, "model_not_found", "model")

    async def check_token(self, request: Request) -> None:
        """Raise ApiError for a request without the token."""
        if self.token and not has_token(request.headers.get("authorization", ""), self.token):
            message = "missing or wrong API key: send the server's token"
            raise ApiError(401, message, "invalid_api_key")

    def start_dialogue(
        self, request: AgentRequest, listener: DialogueListener
    ) -> asyncio.Task[Reply]:
        return asyncio.ensure_future(self.session.ask(
            request.question, request.prompt, listener,
            sampling=request.sampling, seed=request.seed, max_tokens=request.max_tokens,
        ))  # fmt: skip

    async def respond(self, body: ChatRequest) -> Response:
        """Run the dialogue of a request and build the response."""
        # Tokenizing a long prompt takes long, so it must not block the event loop.
        request = await asyncio.to_thread(to_agent_request, body, self.session)
        respond = self.respond_streaming if body.stream else self.respond_whole
        return await respond(request, Envelope(self.name))

    async def respond_whole(self, request: AgentRequest, envelope: Envelope) -> Response:
        reply = await wait_for_reply(self.start_dialogue(request, SILENCE))
        reasoning = extract_reasoning(reply.turns, self._reasoning_filter())
        return JSONResponse(envelope.completion(reply, reasoning))

    async def respond_streaming(self, request: AgentRequest, envelope: Envelope) -> Response:
        """Start the stream with the first delta; an error before it sets the HTTP status."""
        include_documents = bool(request.stream_options.include_documents)
        listener = StreamListener(self._reasoning_filter(), include_documents)
        dialogue = self.start_dialogue(request, listener)
        dialogue.add_done_callback(lambda _: listener.close())
        try:
            first = await listener.next()
            if first is None:
                await wait_for_reply(dialogue)
        except BaseException:
            dialogue.cancel()
            raise
        parts = events(
            envelope, first, listener, dialogue, bool(request.stream_options.include_usage)
        )
        return StreamingResponse(parts, media_type="text/event-stream")

    async def check_health(self) -> None:
        """Raise ApiError if the retrieval server does not answer."""
        retrieval = find_retrieval(self.session.agent.environment)
        if not isinstance(retrieval, RetrievalClient):
            return
        try:
            await retrieval.health()
        except RetrieverRefused:
            return  # other implementations have no /health, but the server is up
        except RetrieverUnavailable as error:
            raise ApiError(503, str(error), "retriever_unavailable") from error

    async def examples(self) -> list[str]:
        """Return questions that the retriever's corpus answers; none if another one is asked."""
        retrieval = find_retrieval(self.session.agent.environment)
        if not isinstance(retrieval, RetrievalClient):
            return []
        try:
            found: list[str] = (await retrieval.info("/page/start"))["examples"]
        except RetrieverRefused:
            return []  # other implementations have no such page
        except RetrieverUnavailable as error:
            raise ApiError(503, str(error), "retriever_unavailable") from error
        return found

    def _reasoning_filter(self) -> ReasoningFilter:
        agent = self.session.agent
        return ReasoningFilter(agent.format.tags, agent.tokenizer.all_special_tokens)


def build_app(service: AgentService) -> FastAPI:
    app = FastAPI(title="Search-R1 agent", version=__version__, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    app.include_router(_v1_router(service))
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


def _v1_router(service: AgentService) -> APIRouter:
    """Build the routes that require the token, if there is one."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(service.check_token)])

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model()]}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.require_model(name)
        return service.model()

    @router.get("/examples", include_in_schema=False)
    async def examples() -> list[str]:
        return await service.examples()

    # The body is not a parameter, since FastAPI would read all of it before checking the token.
    @router.post("/chat/completions", response_model=None, openapi_extra=_BODY)
    async def chat(request: Request) -> Response:
        try:
            body = await read_request(request, service.max_body_bytes)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        service.require_model(body.model)
        response = await run_until_disconnect(request, service.respond(body))
        return response or Response(status_code=CLIENT_CLOSED)

    return router


async def serve(options: ServingOptions, bound: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM. Raises UserError if the agent cannot be started."""
    token = read_token(TOKEN_VARIABLE)
    warn_if_open(bound, token, f"set {TOKEN_VARIABLE}")
    async with open_session(options) as session:
        service = AgentService(
            session, options.name, token, options.max_body_bytes, options.chat_peers
        )
        app = build_app(service)
        server = uvicorn.Server(configure(app, bound, options.allowed_hosts, GRACE_S))
        address = listen(bound)
        # uvicorn raises the signal again after its own shutdown, which would interrupt the
        # shutdown of the engine.
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        running = asyncio.ensure_future(server.serve(sockets=[bound]))
        while not server.started and not running.done():
            await asyncio.sleep(0.05)
        url = f"http://{address}"
        logger.info("%s is served at %s/v1; chat page: %s", options.name, url, url)
        if options.port_file is not None:
            write_port(options.port_file, bound.getsockname()[1])
        await running


@exits_at_signals()
def start(options: ServingOptions) -> int:
    """Serve and return the exit code. Raises UserError or SetupError for a user's mistake."""
    configure_logging(logging.INFO, "%(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "vllm"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    disable_progress_bars()
    with bind(options.host, options.port, options.port_file) as bound:
        asyncio.run(serve(options, bound))
    return 0
