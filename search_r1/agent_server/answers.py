"""The bodies of answers: completions, chunks of a stream, errors in OpenAI's form, what is ours.

Ours: `reasoning_content`, and `search_r1` with searches, status, turns and the number of tokens of
what was read.
"""

import logging
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

logger = logging.getLogger(__name__)


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        """`status` of the answer; `code` for programs; `param` names the field at fault."""
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else None
        return JSONResponse(self.body(), self.status, headers)


def misdirected(text: str) -> JSONResponse:
    """The answer to a request for a name that is not this server's."""
    return ApiError(421, text).response()


INTERNAL = ApiError(500, "an error of the server, which its log describes", "internal_error")


def answer_errors(app: FastAPI) -> None:
    """Give every error of `app` this form, whoever raises it."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        what = f"{request.method} {request.url.path}: {error.detail}"
        return ApiError(error.status_code, what).response()

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        return INTERNAL.response()  # the server logs the traceback


@dataclass(frozen=True)
class Envelope:
    """What all parts of one answer share."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, reply: Reply, reasoning: str) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": reply.answer or "",
            "reasoning_content": reasoning,
            "search_r1": facts(reply),
        }
        choice = {"index": 0, "message": message, "finish_reason": finish_reason(reply)}
        return self._wrap("chat.completion", [choice]) | {"usage": usage(reply)}

    def chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": dict(delta), "finish_reason": finish}
        return self._wrap("chat.completion.chunk", [choice])

    def usage_chunk(self, reply: Reply) -> dict[str, Any]:
        """The last part of a stream whose client wants to count."""
        return self._wrap("chat.completion.chunk", []) | {"usage": usage(reply)}

    def _wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        shared = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return shared | {"choices": choices}


def facts(reply: Reply) -> dict[str, Any]:
    return {
        "searches": [search_json(search) for search in reply.searches],
        "status": reply.status.value,
        "turns": len(reply.turns),
        "observation_tokens": reply.trajectory.num_tokens_of(Origin.OBSERVATION),
    }


def finish_reason(reply: Reply) -> str:
    """`length` for a dialogue that used up its turns or tokens without an answer."""
    return "stop" if reply.status is Status.ANSWERED else "length"


def usage(reply: Reply) -> dict[str, int]:
    """Tokens of the request and of the policy; what was read in between is counted apart."""
    prompt = reply.trajectory.num_tokens_of(Origin.PROMPT)
    sampled = reply.trajectory.num_policy_tokens
    total = prompt + sampled
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": total}
