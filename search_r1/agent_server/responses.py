"""Response bodies: chat completions, stream chunks, and errors in OpenAI's format.

Additions to OpenAI's format: `reasoning_content`, and `search_r1` with the searches, status, number
of turns and number of observation tokens.
"""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from search_r1.inference.dialogue import Reply, search_json
from verl.types import Origin, Status


class ApiError(Exception):
    """An error that is sent to the client."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        """`status`: HTTP status; `code`: machine-readable error; `param`: the invalid field."""
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else None
        return JSONResponse(self.body(), self.status, headers)


INTERNAL = ApiError(500, "internal server error, see the server's log", "internal_error")


def add_error_handlers(app: FastAPI) -> None:
    """Make `app` send all errors in OpenAI's format."""

    @app.exception_handler(ApiError)
    async def handle_api_error(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(error.status_code, message).response()

    @app.exception_handler(Exception)
    async def handle_bug(request: Request, error: Exception) -> JSONResponse:
        return INTERNAL.response()  # uvicorn logs the traceback


@dataclass(frozen=True)
class Envelope:
    """Fields that all chunks of one response share."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, reply: Reply, reasoning: str) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": reply.answer or "",
            "reasoning_content": reasoning,
            "search_r1": search_r1_field(reply),
        }
        choice = {"index": 0, "message": message, "finish_reason": finish_reason(reply)}
        return self.wrap("chat.completion", [choice]) | {"usage": usage(reply)}

    def chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": dict(delta), "finish_reason": finish}
        return self.wrap("chat.completion.chunk", [choice])

    def usage_chunk(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """Build the last chunk of a stream whose client asked for token counts."""
        return self.wrap("chat.completion.chunk", []) | {"usage": counts}

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        shared = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return shared | {"choices": choices}


def search_r1_field(reply: Reply) -> dict[str, Any]:
    return {
        "searches": [search_json(search) for search in reply.searches],
        "status": reply.status.value,
        "turns": len(reply.turns),
        "observation_tokens": reply.trajectory.num_tokens_of(Origin.OBSERVATION),
    }


def finish_reason(reply: Reply) -> str:
    """Return `stop` for an answer, `length` if turns or tokens ran out without one."""
    return "stop" if reply.status is Status.ANSWERED else "length"


def usage(reply: Reply) -> dict[str, int]:
    """Count prompt and policy tokens; observation tokens are reported in `search_r1` instead."""
    trajectory = reply.trajectory
    return token_counts(trajectory.num_tokens_of(Origin.PROMPT), trajectory.num_policy_tokens)


def token_counts(read: int, sampled: int) -> dict[str, int]:
    """Return numbers of tokens in OpenAI's format."""
    total = read + sampled
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": total}
