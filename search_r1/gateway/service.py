"""The gateway: chat completions by the policy of a run, for loops on this machine.

One thread per replica serves on 127.0.0.1. Each episode has an address of its own, whose path holds
a key that nobody can guess, so that an unmodified client needs nothing but `base_url`.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from search_r1.agent_server.responses import INTERNAL, ApiError, Envelope, token_counts
from search_r1.agent_server.streaming import DONE, event, run_until_disconnect
from search_r1.gateway.episode import ENDED, Episode, Turn
from search_r1.gateway.replies import Answered
from search_r1.retrieval.service.running import configure
from verl.types import Completion

MODEL = "policy"
BACKLOG = 2048
NO_RETRY = {"x-should-retry": "false"}
"""OpenAI's clients do not repeat a request whose error has this header."""
CLIENT_CLOSED = 499


class Gateway:
    """The server of a replica's episodes; its thread starts with the first of them."""

    def __init__(self) -> None:
        self.episodes: dict[str, Episode] = {}
        self.address = ""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def serving(self, episode: Episode) -> Iterator[tuple[str, str]]:
        """Serve an episode within the body; gives its base_url and key."""
        with self._lock:
            if not self.address:
                self._start()
        key = secrets.token_urlsafe(24)
        self.episodes[key] = episode
        try:
            yield f"{self.address}/{key}/v1", key
        finally:
            del self.episodes[key]

    def _start(self) -> None:
        bound = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        server = uvicorn.Server(configure(self.app(), bound, (), drain=0))
        threading.Thread(
            target=server.run, args=([bound],), name="search-r1-gateway", daemon=True
        ).start()

    def app(self) -> Starlette:
        """Return the routes of all episodes."""
        return Starlette(
            routes=[
                Route("/{key}/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/{key}/v1/models", self.models),
            ],
            exception_handlers={ApiError: refuse, Exception: report},
        )

    def episode(self, request: Request) -> Episode:
        """Return the episode of a request. Raises ApiError."""
        episode = self.episodes.get(request.path_params["key"])
        if episode is None:
            raise ApiError(404, "there is no such episode, or it has ended", ENDED)
        return episode

    async def models(self, request: Request) -> Response:
        """List the one model."""
        self.episode(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "search-r1"}
        return JSONResponse({"object": "list", "data": [model]})

    async def complete(self, request: Request) -> Response:
        """Answer a request by a sampled turn, whole or as a stream."""
        episode = self.episode(request)
        turn = await episode.answer(await request.body())
        if turn.asked.streams:
            return StreamingResponse(events(turn), media_type="text/event-stream")
        sampled = await run_until_disconnect(request, turn.sample())
        if sampled is None:
            return Response(status_code=CLIENT_CLOSED)
        answer, completion = sampled
        choice = {
            "index": 0,
            "message": answer.message,
            "finish_reason": answer.finish_reason,
            "logprobs": None,
        }
        body = envelope_of(turn).wrap("chat.completion", [choice])
        return JSONResponse(body | {"usage": usage(turn, completion)})


async def refuse(request: Request, error: Exception) -> Response:
    """Send an error that a loop may read; its client does not try again."""
    assert isinstance(error, ApiError), "the handler of this type"
    return JSONResponse(error.body(), error.status, NO_RETRY)


async def report(request: Request, error: Exception) -> Response:
    """Send that the engine failed, or that there is a bug, which is raised in the replica."""
    return JSONResponse(INTERNAL.body(), INTERNAL.status, NO_RETRY)


def envelope_of(turn: Turn) -> Envelope:
    """Return what every answer and chunk of a turn has."""
    return Envelope(MODEL, f"chatcmpl-{turn.number}")


def usage(turn: Turn, completion: Completion) -> dict[str, int]:
    """Count the tokens that were read and sampled."""
    return token_counts(sum(s.num_tokens for s in turn.context), len(completion.ids))


async def events(turn: Turn) -> AsyncIterator[str]:
    """Yield a turn as server-sent events: role, content, calls, end, and usage if asked for."""
    envelope = envelope_of(turn)
    yield event(envelope.chunk({"role": "assistant", "content": ""}))
    try:
        async with contextlib.aclosing(turn.stream()) as pieces:
            async for piece in pieces:
                if isinstance(piece, str):
                    yield event(envelope.chunk({"content": piece}))
                    continue
                answer, completion = piece
                for delta in call_deltas(answer):
                    yield event(envelope.chunk(delta))
                yield event(envelope.chunk({}, answer.finish_reason))
                if turn.asked.includes_usage:
                    yield event(envelope.usage_chunk(usage(turn, completion)))
        yield DONE
    except Exception:  # the status was sent before, so the stream itself tells the client
        yield event(INTERNAL.body())
        raise


def call_deltas(answer: Answered) -> Iterator[dict[str, Any]]:
    """Yield a delta for each call."""
    for index, call in enumerate(answer.tool_calls if answer.calls else ()):
        yield {"tool_calls": [{"index": index, **call}]}
